"""Runs before a first generation with guesses: they are timed, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.errors import ResourceError
from partita.providers.resolve import parse_chain
from partita.runtime.engine.planner import StepPlan
from partita.runtime.engine.request import Request
from partita.runtime.engine.running import serve
from partita.runtime.runner import Runner, load_runner
from partita.runtime.sampling import greedy
from partita.runtime.speculation import warming
from partita.runtime.speculation.warming import warmed
from tests.runtime.handmade import LENGTH, VOCAB, handmade, known_tokens

PROMPT = [(5 * i + 1) % VOCAB for i in range(12)]
KEYS = ("key",)


@pytest.fixture(params=[{}, {"appends": False, "fewer": True, "batch": 3}, {"batch": 2}], ids=["one", "alone", "two"])
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    folder = handmade(tmp_path / "package", states=KEYS, **request.param)
    with load_runner(folder, parse_chain("cpu"), threads=1) as opened:
        yield opened


def test_every_width_is_run_and_the_cache_is_empty_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SECONDS", 60.0)
    executor, widths, run = runner.executor, list[int](), runner.executor.run

    def noted(plan: StepPlan, *rest: Any) -> Any:
        widths.append(plan.new_tokens)
        return run(plan, *rest)

    monkeypatch.setattr(executor, "run", noted)
    found = warmed(executor, (2, 5, LENGTH))
    assert found is not None and found.plain > 0
    assert set(found.wide) == set(found.after) == {2, 5}, "no longer than the cache"
    assert widths.count(2) == widths.count(5) == warming.ROUNDS + 1
    assert list(executor.cache.filled) == [0] * runner.contract.batch_size
    steps = list(serve(executor, [Request(PROMPT, greedy, 10)]))
    assert [token for step in steps for token in step.tokens[0]] == known_tokens(PROMPT, 10, KEYS)


def test_a_model_whose_runs_take_long_is_not_run_for_long(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, count, run = runner.executor, list[int](), runner.executor.run

    def slow(plan: Any, *rest: Any) -> Any:
        count.append(plan.new_tokens)
        time.sleep(0.02)
        return run(plan, *rest)

    monkeypatch.setattr(warming, "SECONDS", 0.05)
    monkeypatch.setattr(executor, "run", slow)
    found = warmed(executor, (2, 5))
    assert found is not None and not found.wide and len(count) <= 5


def test_a_run_that_fails_is_no_error_here(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ResourceError("no memory")

    executor = runner.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", fails)
        assert warmed(executor, (2,)) is None
    assert list(serve(executor, [Request(PROMPT, greedy, 3)]))
