"""Speculative decoding in the Python API: equal tokens, statistics and rejected options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import partita
from partita.runtime.generate.choice.drafting import DraftLength
from tests.partition_reports.samples import section_of
from tests.runtime.handmade_packages import ALL, handmade, known_tokens

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8]
N = 40
DRAWN: dict[str, Any] = {"temperature": 5.0, "seed": 3}
"""Draws of nearly any token: such a text repeats nothing of its own."""


# Drafting that depends neither on the speed of the machine nor on repetition in a text


WRONG = 7
"""One of so many draft tokens is wrong."""


def always_draft(patch: pytest.MonkeyPatch, most: int = 5) -> None:
    """So many draft tokens in each step, whatever steps cost."""
    patch.setattr(DraftLength, "count", lambda self: most)


def knowing(patch: pytest.MonkeyPatch, *texts: Sequence[int]) -> None:
    """N-gram lookup knows these texts, and is wrong at some places of them."""

    def drafter(history: npt.NDArray[np.int64], most: int) -> list[int]:
        begin = history.tolist()
        for text in texts:
            if list(text[: len(begin)]) == begin:
                places = range(len(begin), min(len(begin) + most, len(text)))
                return [text[place] ^ (place % WRONG == 0) for place in places]
        return []

    patch.setattr("partita.library.engine.drafters.ngram_draft", drafter)


def answered(model: partita.Model, **options: object) -> partita.Generation:
    return model.generate(PROMPT, max_new_tokens=N, stop_token_ids=(), **options).run()  # type: ignore[arg-type]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always draft, so that what is tested does not depend on how fast this machine is."""
    always_draft(monkeypatch)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "seed": 4}], ids=["greedy", "drawn"])
def test_draft_tokens_reduce_steps_without_changing_tokens(package: Path, options: dict[str, float]) -> None:
    with partita.load(package, "cpu", observe=False) as model:
        plain = answered(model, **options)
        for how in ({"speculate": "ngram"}, {"draft": package}, {"draft": str(package)}):
            fast = answered(model, **options, **how)
            assert fast.tokens == plain.tokens and fast.text == plain.text
            assert fast.speculation is not None
            assert fast.speculation.drafted > 0 or (options and "speculate" in how), "drawn text repeats little"
            assert len(fast.steps) == len(plain.steps) - fast.speculation.accepted
            if "draft" in how and not options:
                assert fast.speculation.acceptance_rate == 1 and (fast.speculation.tokens_per_step or 0) > 1.5
    assert plain.speculation is None


@pytest.mark.usefixtures("eager")
def test_report_contains_speculation_statistics(package: Path) -> None:
    with partita.load(package, "cpu") as model:
        answered(model, draft=package)
        told = model.report().speculation
        assert told is not None and (told.kind, told.draft) == ("draft", package.name)
        assert told.accepted == told.drafted
        assert told.tokens == N - 1 - 4, "four steps were profiled"
        assert "('acceptance rate', '100.0 %')" in str(section_of(model.report(), "speculation"))
        assert model.report().request.options["draft"] == str(package)
        answered(model)
        assert model.report().speculation is None and section_of(model.report(), "speculation") is None


@pytest.mark.usefixtures("eager")
def test_report_with_per_row_acceptance_passes_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row accepts its own number of draft tokens per step."""
    prompts = [[*PROMPT, 9], PROMPT[2:]]
    knowing(monkeypatch, *([*prompt, *known_tokens(prompt, 30, ("key",))] for prompt in prompts))
    folder = handmade(tmp_path / "package", batch=2, states=("key",))
    with partita.load(folder, "cpu") as model:
        told = model.generate(prompts, max_new_tokens=30, stop_token_ids=(), speculate="ngram").run().speculation
        assert told is not None and 0 < told.accepted < told.drafted
        assert [check for check in model.report().checks if not check.passed] == []


def test_speculation_works_in_worker_process(package: Path) -> None:
    with partita.load(package, "cpu", process="child", observe=False) as model:
        plain, fast = answered(model), answered(model, speculate="ngram")
        assert fast.tokens == plain.tokens
        assert fast.speculation is not None and fast.speculation.steps == len(fast.steps) - 1


@pytest.mark.usefixtures("eager")
def test_draft_tokens_are_not_shared_between_completions(package: Path) -> None:
    """Otherwise response times would reveal the prompts of other users."""
    with partita.load(package, "cpu", observe=False) as model:
        first, again = (answered(model, **DRAWN, speculate="ngram").speculation for _ in range(2))
    assert first is not None and again is not None and again.accepted == first.accepted


def test_invalid_speculation_options_are_rejected(package: Path, pair: Path, tmp_path: Path) -> None:
    other = handmade(tmp_path / "other")
    with partita.load(package, "cpu", observe=False) as model:
        for options, says in (
            ({"speculate": "tree"}, "`speculate=tree`: the only value is ngram"),
            ({"speculate": "ngram", "draft": package}, "set only one of them"),
            ({"draft": other}, "its vocabulary differs from that of .*; a draft package needs the same tokenizer"),
        ):
            with pytest.raises(partita.ArgumentError, match=says):
                answered(model, **options)
        with pytest.raises(partita.PackageError, match="nowhere"):
            answered(model, draft=package / "nowhere")
    says = "requires batch size 1, but .* has 2"
    with partita.load(pair, "cpu", observe=False) as model, pytest.raises(partita.ArgumentError, match=says):
        model.generate([PROMPT, PROMPT], draft=package)


def test_speculation_rejects_conv_and_recurrent_states(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "package", states=ALL)
    with partita.load(folder, "cpu", observe=False) as model:
        with pytest.raises(partita.ArgumentError, match=r"its states cannot be rewound: past") as caught:
            answered(model, speculate="ngram")
        assert "cannot verify draft tokens" in str(caught.value)
        assert len(answered(model).tokens[0]) > 1, "and the model goes on without"
