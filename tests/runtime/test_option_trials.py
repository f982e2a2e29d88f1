"""An option is found by starting the provider without it, whatever the message says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from partita.providers.resolve import Resolution, known_providers
from partita.providers.start import failure
from partita.runtime import option_trials
from partita.runtime.option_trials import by_experiment

PROVIDER = known_providers()["openvino"]
UNCLEAR = failure(PROVIDER, "initialisation_failed", "stoi")


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[str, str]], bool]], None]:
    """The provider starts where the rule says so of its options."""

    def obey(rule: Callable[[dict[str, str]], bool]) -> None:
        monkeypatch.setattr(option_trials, "starts", lambda resolution: rule(dict(resolution.options)))

    return obey


def given(**options: str) -> Resolution:
    return Resolution(PROVIDER, "active", options=options)


def test_the_option_without_which_it_starts_is_named_with_what_was_said(starting):
    starting(lambda options: "num_streams" not in options)
    found = by_experiment(given(precision="FP32", num_streams="x"), UNCLEAR)
    assert found.reason == "option_rejected"
    assert "num_streams=x" in found.evidence and "stoi" in found.evidence and "precision" not in found.evidence


def test_options_that_are_refused_together_are_named_together(starting):
    starting(lambda options: not options)
    found = by_experiment(given(a="1", b="2"), UNCLEAR)
    assert found.reason == "option_rejected" and "a=1 and b=2" in found.evidence


@pytest.mark.parametrize("always", [True, False])
def test_where_no_option_makes_the_difference_the_failure_stays(starting, always):
    starting(lambda options: always)
    assert by_experiment(given(a="1"), UNCLEAR) is UNCLEAR


def test_a_cause_that_is_known_is_not_looked_into(starting):
    starting(lambda options: pytest.fail("asked"))
    known = failure(PROVIDER, "library_missing", "libx.so")
    assert by_experiment(given(a="1"), known) is known
    assert by_experiment(Resolution(PROVIDER, "active"), UNCLEAR) is UNCLEAR


def test_the_model_that_is_tried_is_taken_by_the_cpu():
    assert option_trials.starts(Resolution(known_providers()["cpu"], "active"))
