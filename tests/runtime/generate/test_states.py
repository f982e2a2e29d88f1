"""States of rows: summing (recurrent) states, keys with rotary frequencies by length, and shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine_steps import generate
from partita.errors import GenerationError
from partita.providers.resolve import parse_chain
from partita.runtime.generate.cache import StoredState
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import run_facts
from partita.runtime.generate.runner import load_runner
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.place.run_phases import run_package
from partita.runtime.verify.replay import replay
from tests.runtime.handmade_packages import ALL, LENGTH, PHASES, PROMPTS, VOCAB, handmade, known_tokens

CPU = parse_chain("cpu")
STATES = [ALL, ("recurrent",), ("conv", "key"), ("key",)]


def run(runner, prompts, *, new=9, chunk=512, stop=(), sampler=greedy):
    return list(generate(runner, prompts, max_new_tokens=new, sampler=sampler, stop_ids=stop, prefill_chunk=chunk))


def row(steps, index=0):
    return [token for step in steps for token in step.tokens[index]]


@pytest.mark.parametrize("states", STATES, ids="+".join)
@pytest.mark.parametrize("shapes", PHASES)
@pytest.mark.parametrize(("batch", "appends"), [(1, True), (2, True), (3, True), (3, False)])
def test_each_row_generates_expected_tokens_of_its_own_prompt(opened, shapes, batch, appends, states):
    runner = opened(shapes=shapes, batch=batch, appends=appends, states=states)
    for prompts in (PROMPTS[:batch], PROMPTS[:batch][::-1]):
        for chunk in (512, 4, 1):
            steps = run(runner, prompts, chunk=chunk)
            assert [row(steps, index) for index in range(batch)] == [known_tokens(p, 9, states) for p in prompts]


@pytest.mark.parametrize("shapes", PHASES)
@pytest.mark.parametrize("chooses_rows", [True, False], ids=["K", "all logits"])
@pytest.mark.parametrize(("batch", "appends"), [(1, True), (3, True), (3, False)])
def test_replay_verifies_package_with_summing_states(tmp_path, shapes, chooses_rows, batch, appends):
    folder = handmade(tmp_path, shapes=shapes, batch=batch, appends=appends, chooses_rows=chooses_rows)
    found = replay(folder, CPU, threads=1)
    assert found.status == "verified", found.detail
    assert [step.step for step in found.steps] == [
        "prefill",
        "chunked prefill",
        *(f"decode {n}" for n in range(1, 7)),
        *["rows of different length"] * (batch > 1),
    ]


@pytest.mark.parametrize("memory", ["Cpu", "Cuda"])
@pytest.mark.parametrize("rows", [[1], [0, 2], [2, 0, 1]])
def test_clear_rows_zeroes_only_selected_rows(memory, rows):
    """Cuda: on the host, through the calls used for CUDA memory."""
    filled = host_buffer((3, 4), "float16")
    filled.host[...] = np.arange(1, 13).reshape(3, 4)
    before = filled.host.copy()
    buffer = filled if memory == "Cpu" else replace(filled, array=None, memory=memory)
    assert buffer.readable
    buffer.clear_rows(rows)
    before[rows] = 0
    np.testing.assert_array_equal(filled.host, before)


def test_states_without_row_reset_hold_a_single_sequence(opened, monkeypatch):
    """ONNX Runtime's Python package cannot read bfloat16 back from CUDA."""
    monkeypatch.setattr(StoredState, "separate", False)
    assert [opened(batch=batch).rows for batch in (1, 2)] == [1, 1]
    runner = opened(batch=2)
    assert row(run(runner, PROMPTS[:1])) == known_tokens(PROMPTS[0], 9)
    assert row(run(runner, PROMPTS[1:2])) == known_tokens(PROMPTS[1], 9)


@pytest.mark.parametrize("states", [ALL, ("key",)], ids=["states", "keys"])
def test_run_package_supports_more_decode_steps_than_cache_length(opened, states):
    runner = opened(batch=2, states=states)
    assert run_package(runner, 60) is None
    assert [step.phase for step in runner.recorder.steps].count("decode") == 60 > LENGTH
    assert all(count <= LENGTH for count in runner.cache.lengths)


# The rope_length of each step, and recomputation above the limit: handmade_packages.py says what the logits show


LIMIT = 12
STOP = 50


class Spy:
    """A sampler that keeps what the logits show: the length of the step, and the smallest one that is cached."""

    def __init__(self, stop_after=()):
        self.now, self.cached, self.stop_after = [], [], stop_after

    def __call__(self, logits, history):
        self.now.append(int(logits.argmax()))
        smallest = [index for index, value in enumerate(logits) if value in (1, 3)]
        self.cached.append(smallest[0])
        return STOP if len(history) in self.stop_after else 7


@pytest.fixture
def generated(tmp_path):
    """Generate with a spy; gives the spy, the steps and the facts."""

    def factory(prompts, *, new=10, recompute_above=LIMIT, chunk=512, stop_after=(), **options):
        folder = handmade(
            tmp_path / "rope", graph="rope", batch=len(prompts), recompute_above=recompute_above, **options
        )
        spy = Spy(stop_after)
        with load_runner(folder, CPU, threads=1) as runner:
            steps = list(
                generate(runner, prompts, max_new_tokens=new, sampler=spy, stop_ids=[STOP], prefill_chunk=chunk)
            )
            return spy, steps, run_facts(runner)

    return factory


def prompt(length):
    return [3] * length


@pytest.mark.parametrize("chunk", [512, 2, 1])
@pytest.mark.parametrize("shapes", PHASES)
def test_every_prompt_chunk_uses_full_prompt_length(generated, shapes, chunk):
    spy, _, _ = generated([prompt(9)], new=3, shapes=shapes, chunk=chunk, recompute_above=None)
    assert spy.now == [9, 10, 11]
    assert spy.cached == [9, 9, 9]


@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.parametrize("shapes", PHASES)
def test_sequence_crossing_limit_is_recomputed_once(generated, shapes, chunk):
    spy, steps, facts = generated([prompt(9)], shapes=shapes, chunk=chunk)
    assert spy.now == list(range(9, 19))
    assert spy.cached == [9] * 4 + [13] * 6, "a key of a shorter text was left in the cache"
    again = [step for step in steps if step.is_repeated]
    assert {step.phase for step in again} == {"prefill"}
    assert sum(step.new_tokens for step in again) == 13
    assert [step.tokens[0] for step in again] == [()] * (len(again) - 1) + [(7,)]
    assert steps[-1].finish == ("length",)


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1])
def test_length_equal_to_limit_counts_as_short(generated, length):
    spy, steps, _ = generated([prompt(length)], new=4)
    assert spy.now == list(range(length, length + 4))
    assert any(step.is_repeated for step in steps) == (length <= LIMIT)
    assert spy.cached[-1] == 13


def test_longest_row_determines_rope_length_of_batch(generated):
    spy, steps, _ = generated([prompt(10), prompt(4)], new=6)
    assert spy.now == [length for length in range(10, 16) for _ in range(2)]
    assert spy.cached == [10] * 6 + [13] * 6
    (again,) = [step for step in steps if step.is_repeated]
    assert (again.new_tokens, again.row_tokens) == (13, 13 + 7)


def test_finished_row_is_not_recomputed(generated):
    """Row 1 ends with its second token."""
    spy, steps, _ = generated([prompt(10), prompt(4)], new=6, stop_after={5})
    (again,) = [step for step in steps if step.is_repeated]
    assert again.row_tokens == 13
    assert steps[-1].finish == ("length", "stop")
    assert spy.cached[-1] == 13


def test_replay_verifies_with_constant_rope_length(tmp_path):
    """The reference processed prompt and completion at once, so every step has the frequencies of the whole."""
    for shapes in PHASES:
        folder = handmade(tmp_path / shapes, graph="rope", shapes=shapes, batch=2, recompute_above=LIMIT)
        found = replay(folder, CPU, threads=1)
        assert found.status == "verified", found.detail


@pytest.mark.parametrize(("limit", "length"), [(LIMIT, 17), (None, 11)])
def test_next_turn_does_not_reuse_keys_of_another_length(tmp_path, limit, length):
    """Cached keys of a short sequence do not match the frequencies of a longer one."""
    folder = handmade(tmp_path / "rope", graph="rope", batch=1, recompute_above=limit)
    spy = Spy()
    with load_runner(folder, CPU, threads=1) as runner:
        engine = GenerationLoop(runner, shares=True)
        for tokens in (prompt(6), prompt(length)):
            engine.add_request(Request(tuple(tokens), spy, max_new_tokens=2))
            while engine.step() is not None:
                pass
            engine.release_row(0)
    assert spy.now[-2:] == [length, length + 1]
    if limit:
        assert spy.cached[-2:] == [17, 17], "a key of a shorter text was left in the cache"
    assert engine.prefixes is not None and not engine.prefixes.reused_tokens


# Prefix sharing: common prefixes of prompts are prefilled once, and outputs do not change


SYSTEM = [(5 * i + 1) % VOCAB for i in range(24)]
QUESTIONS = [[9, 4, 33], [2], [7, 7, 1, 50, 3], [60, 1]]
ASKED = [[*SYSTEM, *question] for question in QUESTIONS]
KINDS = [("key",), ALL, ("recurrent",)]


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


@pytest.mark.parametrize("states", KINDS, ids="+".join)
def test_steps_of_other_rows_do_not_spoil_a_released_row(opened, states):
    """Also with recurrent states, which take in the padding of the others' steps."""
    engine = GenerationLoop(opened(batch=2, states=states, fewer=False), shares=True)
    for prompt in (ASKED[0], ASKED[1]):
        engine.add_request(Request(prompt, greedy, 3 if prompt is ASKED[0] else 9))
    some(engine, 4, {})
    engine.release_row(0)
    finish(engine)
    engine.release_row(1)
    turn = [*ASKED[0], *known_tokens(ASKED[0], 3, states), 5]
    row = engine.add_request(Request(turn, greedy, 3))
    assert finish(engine)[0][row] == known_tokens(turn, 3, states)


@pytest.mark.parametrize("states", KINDS, ids="+".join)
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
        for prompt, taken in ((ASKED[round % 4], len(QUESTIONS[round % 4])), (other, None), (other[:20], None)):
            row = engine.add_request(Request(prompt, greedy, 3))
            found, count = finish(engine)
            assert found[row] == known_tokens(prompt, 3, states)
            assert taken is None or count == taken + 2
            engine.release_row(row)


def test_device_rows_are_reused_but_not_copied(opened, monkeypatch):
    runner = opened(batch=2, states=("key",))
    monkeypatch.setattr(type(runner.cache), "on_host", False)
    engine = GenerationLoop(runner, shares=True)
    rows = [engine.add_request(Request(prompt, greedy, 3)) for prompt in ASKED[:2]]
    found, taken = finish(engine)
    assert [found[row] for row in rows] == [known_tokens(prompt, 3, ("key",)) for prompt in ASKED[:2]]
    assert taken == sum(map(len, ASKED[:2])) + 2 * 2
    engine.release_row(rows[1])
    row = engine.add_request(Request(ASKED[2], greedy, 3))
    found, taken = finish(engine)
    assert found[row] == known_tokens(ASKED[2], 3, ("key",)) and taken == len(QUESTIONS[2]) + 2


# --- a prefix that a row gives out, and another run takes in ---------------------------------------------------------


def test_prefix_above_rope_threshold_cannot_be_saved(opened):
    runner = opened(graph="rope", recompute_above=20)
    with pytest.raises(GenerationError, match="24 tokens cannot be saved as a prefix: the rotary frequencies"):
        saved(GenerationLoop(runner), SYSTEM)
    prefix = saved(GenerationLoop(runner), SYSTEM[:10])
    engine = GenerationLoop(runner, shares=True)
    engine.prefixes.add(prefix)
    engine.add_request(Request(ASKED[0], greedy, 2))
    assert finish(engine)[1] == len(ASKED[0]) + 1, "the keys of a longer prompt differ"


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
