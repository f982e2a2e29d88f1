"""Prefix sharing: common prompt prefixes are prefilled once, and outputs do not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from partita.errors import GenerationError
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from tests.runtime.handmade_packages import ALL, VOCAB, known_tokens

SYSTEM = [(5 * i + 1) % VOCAB for i in range(24)]
QUESTIONS = [[9, 4, 33], [2], [7, 7, 1, 50, 3], [60, 1]]
PROMPTS = [[*SYSTEM, *question] for question in QUESTIONS]
STATES = [("key",), ALL, ("recurrent",)]


def some(engine: GenerationLoop, steps: int, found: dict[int, list[int]]) -> int:
    """Add the tokens of so many steps to those of each row; how many were taken in on the way."""
    taken = 0
    for _ in range(steps):
        step = engine.step()
        if step is None:
            break
        taken += step.row_tokens
        for row, tokens in enumerate(step.tokens):
            found.setdefault(row, []).extend(tokens)
    return taken


def finish(engine: GenerationLoop) -> tuple[dict[int, list[int]], int]:
    """Tokens of each row until nothing is left to do, and how many were taken in on the way."""
    found: dict[int, list[int]] = {}
    return found, some(engine, 999, found)


def saved(engine: GenerationLoop, tokens: list[int]):
    row = engine.add_request(Request(tokens))
    while engine.step() is not None:
        pass
    prefix = engine.save_prefix(row)
    engine.release_row(row)
    return prefix


@pytest.mark.parametrize("states", STATES, ids="+".join)
def test_steps_of_other_rows_do_not_spoil_a_released_row(opened, states):
    """Also with recurrent states, which take in the padding of the others' steps."""
    engine = GenerationLoop(opened(batch=2, states=states, fewer=False), shares=True)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        engine.add_request(Request(prompt, greedy, 3 if prompt is PROMPTS[0] else 9))
    some(engine, 4, {})
    engine.release_row(0)
    finish(engine)
    engine.release_row(1)
    turn = [*PROMPTS[0], *known_tokens(PROMPTS[0], 3, states), 5]
    row = engine.add_request(Request(turn, greedy, 3))
    assert finish(engine)[0][row] == known_tokens(turn, 3, states)


@pytest.mark.parametrize("states", STATES, ids="+".join)
@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 3}, {"batch": 3, "appends": False, "fewer": True}, {"shapes": "one"}, {"shapes": "pair"}],
    ids=str,
)
def test_prefix_from_earlier_run_is_copied_and_not_evicted(opened, states, options):
    prefix = saved(GenerationLoop(opened(states=states)), SYSTEM)
    assert prefix.tokens.tolist() == SYSTEM
    runner = opened(states=states, **options)
    engine = GenerationLoop(runner, shares=True)
    engine.prefixes.add(prefix)
    for round in range(4):
        other = [round + 1, *SYSTEM]
        for prompt, taken in ((PROMPTS[round % 4], len(QUESTIONS[round % 4])), (other, None), (other[:20], None)):
            row = engine.add_request(Request(prompt, greedy, 3))
            found, count = finish(engine)
            assert found[row] == known_tokens(prompt, 3, states)
            assert taken is None or count == taken + 2
            engine.release_row(row)


def test_device_rows_are_reused_but_not_copied(opened, monkeypatch):
    runner = opened(batch=2, states=("key",))
    monkeypatch.setattr(type(runner.cache), "on_host", False)
    engine = GenerationLoop(runner, shares=True)
    rows = [engine.add_request(Request(prompt, greedy, 3)) for prompt in PROMPTS[:2]]
    found, taken = finish(engine)
    assert [found[row] for row in rows] == [known_tokens(prompt, 3, ("key",)) for prompt in PROMPTS[:2]]
    assert taken == sum(map(len, PROMPTS[:2])) + 2 * 2
    engine.release_row(rows[1])
    row = engine.add_request(Request(PROMPTS[2], greedy, 3))
    found, taken = finish(engine)
    assert found[row] == known_tokens(PROMPTS[2], 3, ("key",)) and taken == len(QUESTIONS[2]) + 2


# --- a prefix that a row gives out, and another run takes in ---------------------------------------------------------


def test_prefix_above_rope_threshold_cannot_be_saved(opened):
    runner = opened(graph="rope", recompute_above=20)
    with pytest.raises(GenerationError, match="24 tokens cannot be saved as a prefix: the rotary frequencies"):
        saved(GenerationLoop(runner), SYSTEM)
    prefix = saved(GenerationLoop(runner), SYSTEM[:10])
    engine = GenerationLoop(runner, shares=True)
    engine.prefixes.add(prefix)
    engine.add_request(Request(PROMPTS[0], greedy, 2))
    assert finish(engine)[1] == len(PROMPTS[0]) + 1, "the keys of a longer prompt differ"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["key", "recurrent"])
def test_device_rows_are_saved_and_loaded_through_host_memory(dtype, kind):
    """Runs on host memory through the calls used for CUDA memory."""

    from partita.package.contract import State
    from partita.runtime.generate.cache import StoredState
    from partita.runtime.ort.buffers import host_buffer

    filled = host_buffer((3, 2, 5, 4), dtype)
    filled.host[...] = np.arange(120).reshape(3, 2, 5, 4)
    before = filled.host.copy()

    class Session:
        def state_buffer(self, *asked):
            return replace(filled, array=None, memory="Cuda")

    state = State(past="past", present="present", layer=0, kind=kind, shape=(3, 2, 5, 4), dtype=dtype)
    store = StoredState(state, Session(), 3)  # type: ignore[arg-type]
    tokens = 3 if kind == "key" else 5
    assert store.saves(tokens, 5) and store.can_load()
    values = store.save_row(2, tokens)
    np.testing.assert_array_equal(values, before[2, :, :tokens])
    assert store.row_shape(tokens) == ((2, tokens, 4), dtype)
    store.load_row(0, values)
    before[0, :, :tokens] = before[2, :, :tokens]
    np.testing.assert_array_equal(filled.host, before)
