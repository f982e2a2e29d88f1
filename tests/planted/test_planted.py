"""Fallback reasons on graphs with a known cause; plain ONNX Runtime runs a control graph without the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import require, require_dry_run
from tests.contract.commands import device_is_there, wrong_processor
from tests.contract.expectations import ENVIRONMENTS
from tests.planted.cases import CASES, DEFAULTS, HEAVY, NO_FALLBACK, Case
from tests.planted.judge import Outcome, Verdict, judge, outcomes, plainly

LEAST = 500


def planted(cases: tuple[Case, ...]) -> pytest.MarkDecorator:
    """A test per case, run by the Python of its environment."""

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        return [pytest.mark.environment(case.environment), *([pytest.mark.heavy] if case.name in HEAVY else [])]

    return pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case), id=case.name) for case in cases])


def needed(case: Case) -> None:
    """Skip, or fail in CI, where the machine lacks what the case needs."""
    if case.run.dry_run or (case.control and case.control.dry_run):
        require_dry_run()
    for target in ENVIRONMENTS[case.environment].targets:
        if target.provider == case.provider:
            if why := wrong_processor(target):
                pytest.skip(why)
            if target.needs:
                require(target.needs, device_is_there(target))


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases that this process runs."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = {param["case"].name: param["case"] for param in params if isinstance(param.get("case"), Case)}
    inside = request.config.getoption("--inside")
    return [case for case in cases.values() if ENVIRONMENTS[case.environment].python_of == inside]


@pytest.fixture(scope="session")
def verdict_of(selected: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Verdict]:
    """What came of a case; all of them are run with the first that is asked for."""
    folder = tmp_path_factory.mktemp("planted")
    ended: dict[str, Outcome] = {}

    def verdict(case: Case) -> Verdict:
        if not ended:
            ended.update(outcomes(selected, folder))
        return judge(case, ended[case.command])

    return verdict


@pytest.fixture(scope="session")
def plain_of(selected: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, bool], str]:
    """Where plain ONNX Runtime has the node of a case, in the planted graph or in the control."""
    folder = tmp_path_factory.mktemp("plain")
    answers: dict[tuple[str, bool], str] = {}

    def plain(case: Case, control: bool) -> str:
        if not answers:
            answers.update(plainly(selected, folder))
        return answers[case.name, control]

    return plain


@planted(CASES)
def test_reported_reason_is_the_planted_cause(case: Case, verdict_of: Callable[[Case], Verdict]):
    needed(case)
    verdict = verdict_of(case)
    assert not verdict.wrong, f"{case.planted}: {verdict.wrong}\n{verdict}"


@planted(tuple(case for case in CASES if case.plain or case.expected == NO_FALLBACK))
def test_plain_onnxruntime_rejects_node_if_fallback_is_expected(case: Case, plain_of: Callable[[Case, bool], str]):
    needed(case)
    assert (plain_of(case, False) == "supported") == (case.expected == NO_FALLBACK), case.planted


@planted(tuple(case for case in CASES if case.control))
def test_plain_onnxruntime_supports_control_without_cause(case: Case, plain_of: Callable[[Case, bool], str]):
    needed(case)
    assert plain_of(case, True) == "supported", case.planted


def test_cases_cover_every_environment_and_most_have_control():
    assert len({case.name for case in CASES}) == len(CASES) >= LEAST
    assert {case.environment for case in CASES} == set(DEFAULTS)
    caused = [case for case in CASES if case.expected != NO_FALLBACK]
    uncontrolled = [case.name for case in caused if case.control is None]
    assert len(uncontrolled) <= len(caused) // 3, uncontrolled
