"""Steady steps equal general steps: the same requests give equal recorded facts, except times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from partita.errors import GenerationError
from partita.options.generation import Sampling
from partita.providers.resolve import parse_chain
from partita.runtime.generate import loop
from partita.runtime.generate.choice.next_tokens import SteadyStep
from partita.runtime.generate.choice.sampling import greedy, make_sampler
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.record import Step
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import load_runner
from tests.runtime.handmade_packages import ALL, BROKEN, VOCAB, handmade

PROMPTS = [[(5 * i + 1) % (VOCAB - 1) for i in range(20)], [(11 * i + 2) % (VOCAB - 1) for i in range(6)], [9, 4, 33]]
Script = Callable[[GenerationLoop], None]


def steps(engine: GenerationLoop, count: int = 99) -> None:
    """Make so many steps, or as many as there are."""
    for _ in range(count):
        if engine.step() is None:
            break


def rows_join_and_end(engine: GenerationLoop) -> None:
    first = engine.add_request(Request(PROMPTS[0], greedy, 14))
    steps(engine, 8)
    second = engine.add_request(Request(PROMPTS[1], make_sampler(Sampling(temperature=0.8, top_k=9, seed=3)), 9))
    steps(engine, 5)
    engine.release_row(first)
    third = engine.add_request(
        Request(PROMPTS[2], make_sampler(Sampling(repetition_penalty=1.3)), 30, frozenset({4, 8, 15}))
    )
    steps(engine)
    assert first != second != third


def one_row_to_the_end_of_the_cache(engine: GenerationLoop) -> None:
    row = engine.add_request(Request(PROMPTS[1], greedy, 99))
    steps(engine)
    assert engine.row(row).finish == "cache_full"


SCRIPTS: list[Script] = [rows_join_and_end, one_row_to_the_end_of_the_cache]


class Both:
    """Runs a script with steady steps and without."""

    def __init__(self, folder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.steady = 0

    def run(self, script: Script, *, observe: bool = False, shares: bool = False, **options) -> list[list[object]]:
        """Steps, cache facts and cursors of the general way, then with steady steps."""
        package = handmade(self.folder / "package", **options)
        with self.monkeypatch.context() as patch:
            patch.setattr(loop, "steady_step", lambda *given: None)
            general = self._facts(package, script, observe=observe, shares=shares)
        again = GenerationLoop._repeat_step

        def counted(engine: GenerationLoop, steady: SteadyStep, *more: Any) -> Step:
            self.steady += 1
            return again(engine, steady, *more)

        with self.monkeypatch.context() as patch:
            patch.setattr(GenerationLoop, "_repeat_step", counted)
            return [general, self._facts(package, script, observe=observe, shares=shares)]

    def _facts(self, package, script: Script, *, observe: bool, shares: bool) -> list[object]:
        with load_runner(package, parse_chain("cpu"), threads=1, observe=observe) as runner:
            engine = GenerationLoop(runner, 8, records=True, shares=shares)
            raised = None
            try:
                script(engine)
            except GenerationError as error:
                raised = str(error)
            untimed = [
                step._replace(run_seconds=0, overhead_seconds=0, draft_seconds=0) for step in runner.recorder.steps
            ]
            cache = runner.cache
            values = [np.array(buffer.values()) for buffer in cache.buffers]
            return [
                untimed,
                raised,
                [store.fact() for store in cache.stores],
                [*cache.lengths],
                cache.dirty,
                values,
            ]


@pytest.fixture
def both(tmp_path, monkeypatch):
    return Both(tmp_path, monkeypatch)


def assert_equal(general: list[Any], steady: list[Any]) -> None:
    """Everything is equal, the bytes of the cache included."""
    assert steady[:-1] == general[:-1]
    for left, right in zip(general[-1], steady[-1], strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("script", "batch"), [(SCRIPTS[0], 3), (SCRIPTS[1], 3), (SCRIPTS[1], 1)])
@pytest.mark.parametrize("states", [("key",), ALL], ids=["keys", "states"])
@pytest.mark.parametrize("shapes", ["one", "pair", "any"])
def test_steady_steps_equal_general_steps(both, script, states, shapes, batch):
    assert_equal(*both.run(script, batch=batch, states=states, shapes=shapes))
    assert both.steady > 3


def test_steady_steps_of_partial_batch_equal_general_steps(both):
    assert_equal(*both.run(rows_join_and_end, batch=3, states=("key",), appends=False, fewer=True))
    assert both.steady > 5


def test_profiled_steps_use_the_general_path(both):
    general, steady = both.run(rows_join_and_end, batch=3, states=("key",), observe=True, shares=True)
    assert_equal(general, steady)
    assert any(step.observed for step in steady[0]) and not all(step.observed for step in steady[0])
    assert all(fact.checked_steps and fact.same_address for fact in steady[2]) and both.steady > 5


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("any_logits", [False, True])
def test_non_finite_logits_in_steady_step_are_handled_as_in_general_step(both, alone, any_logits):
    """A token with a non-finite embedding is sampled after some steps."""

    def draw(logits: np.ndarray, history: np.ndarray) -> int:
        return BROKEN if len(history) == 12 else int(np.nan_to_num(logits).argmax())

    def script(engine: GenerationLoop) -> None:
        engine.add_request(Request(PROMPTS[1], draw, 20, fails_alone=alone, any_logits=any_logits))
        engine.add_request(Request(PROMPTS[1], greedy, 12))
        steps(engine)

    general, steady = both.run(script, graph="felt", batch=2, states=("key",))
    assert_equal(general, steady)
    assert both.steady > 3
    errors = [step.errors for step in steady[0] if step.errors]
    assert bool(errors) == alone and (steady[1] is not None) == (not alone and not any_logits)


def test_empty_drafts_do_not_disable_steady_steps(both):
    def script(engine: GenerationLoop) -> None:
        drafts = iter([[], [], [], [3], []])
        engine.add_request(
            Request(PROMPTS[1], greedy, 20, drafter=lambda history, most: next(drafts, []) if most else [])
        )
        steps(engine)

    general, steady = both.run(script, batch=1, states=("key",))
    assert_equal(general, steady)
    assert both.steady > 10 and any(step.drafted for step in steady[0])
