"""Token loop over real sessions: tokens for any chunk size and batch, end reasons, and the facts of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.engine_steps import generate
from partita.diagnosis.session_index import SessionIndex
from partita.errors import GenerationError
from partita.partition_reports.cost import node_times
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop, serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import run_facts
from partita.runtime.ort.native_log import parse_plan, parse_profile, unread_profile
from tests.conftest import BASE
from tests.runtime.handmade_packages import ALL, BROKEN, VOCAB, known_tokens
from tests.runtime.handmade_packages import PROMPTS as TEXTS


def random_prompt(seed: int, size: int) -> list[int]:
    """Token ids of the tiny checkpoint, none of them special."""
    return np.random.default_rng(seed).integers(3, BASE["vocab_size"], size).tolist()


PROMPTS = tuple(random_prompt(seed, size) for seed, size in ((3, 20), (4, 7), (5, 3)))
# Chunks of 6 do not divide the 64 tokens of the cache: the last one does not fit.
PAIR: dict[str, Any] = {"attention": "gqa", "static_shapes": True, "prefill_chunk": 6}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "onnx24": {"attention": "onnx24"},
    "gqa, 3 rows": {"batch_size": 3},
    "onnx24, 3 rows": {"attention": "onnx24", "batch_size": 3},
    "static pair": PAIR,
    "static pair, 2 rows": {**PAIR, "batch_size": 2},
    "static pair, onnx24, 2 rows": {**PAIR, "batch_size": 2, "attention": "onnx24"},
}


def run(runner, prompts, *, new=20, stop=(), chunk=512, sampler=greedy):
    return list(generate(runner, prompts, max_new_tokens=new, sampler=sampler, stop_ids=stop, prefill_chunk=chunk))


def row(steps, index=0):
    return [token for step in steps for token in step.tokens[index]]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.heavy) if kind == "static pair, 2 rows" else kind for kind in KINDS]
)
@pytest.mark.parametrize("chunk", [512, 5, 1])
def test_greedy_tokens_match_transformers(open_runner, reference, kind, chunk):
    runner = open_runner(**KINDS[kind])
    steps = run(runner, PROMPTS[: runner.contract.batch_size], chunk=chunk)
    for index in range(runner.contract.batch_size):
        assert row(steps, index) == reference(PROMPTS[index], 20)
    assert steps[-1].finish == ("length",) * runner.contract.batch_size


@pytest.mark.parametrize("kind", ["gqa, 3 rows", "onnx24, 3 rows"])
def test_joining_prompt_is_prefilled_separately_in_chunks(open_runner, reference, kind):
    runner = open_runner(**KINDS[kind])
    engine = GenerationLoop(runner, prefill_chunk=8, records=True)
    found: list[list[int]] = [[], [], []]

    def steps(count: int) -> None:
        while count and (step := engine.step()) is not None:
            count -= 1
            for row, tokens in enumerate(step.tokens):
                found[row].extend(tokens)

    engine.add_request(Request(PROMPTS[1], greedy, 20))
    steps(3)
    for prompt in (PROMPTS[2], PROMPTS[0]):  # the first of them is read before the other joins, in another place
        engine.add_request(Request(prompt, greedy, 20))
        steps(2)
    steps(1000)
    assert found == [reference(prompt, 20) for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[0])]
    assert [step.row_tokens for step in runner.recorder.steps if step.phase == "prefill"] == [7, 3, 8, 8, 4]
    assert [step.row_tokens for step in runner.recorder.steps][:3] == [7, 1, 1], "a step of one row, and not of three"


def test_static_chunk_exceeding_cache_is_prefilled_token_by_token(open_runner, reference):
    """60 of 62 prompt tokens fit in chunks of 6; another chunk would end at 66, cache length 64."""
    runner = open_runner(**PAIR)
    assert (runner.capacity.chunk, runner.contract.max_length) == (6, 64)
    prompt = random_prompt(6, 62)
    steps = run(runner, [prompt])
    assert [step.new_tokens for step in steps if step.phase == "prefill"] == [*[6] * 10, 1, 1]
    assert row(steps) == reference(prompt, 2)
    assert steps[-1].finish == ("cache_full",)


def test_stop_token_ends_only_its_row(open_runner, reference):
    runner = open_runner(batch_size=3)
    expected = [reference(prompt, 20) for prompt in PROMPTS]
    stop = expected[1][4]
    steps = run(runner, PROMPTS, stop=[stop])
    for index, tokens in enumerate(expected):
        kept = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert row(steps, index) == kept
        assert steps[-1].finish[index] == ("stop" if stop in tokens else "length")


def test_full_row_does_not_change_other_rows(open_runner, reference):
    runner = open_runner(attention="onnx24", batch_size=3)
    long = random_prompt(7, runner.contract.max_length - 2)
    steps = run(runner, [long, *PROMPTS[1:]], new=15)
    assert steps[-1].finish == ("cache_full", "length", "length")
    assert row(steps, 0) == reference(long, 2)
    assert [row(steps, index) for index in (1, 2)] == [reference(prompt, 15) for prompt in PROMPTS[1:]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_error_names_step_and_row(open_runner, reference, bad):
    """The cache holds `bad`, as after an overflow in the graph; the next run is correct."""
    runner = open_runner(attention="onnx24", batch_size=3)
    steps = generate(runner, PROMPTS, max_new_tokens=20, sampler=greedy)
    next(steps)
    next(steps)
    runner.cache.buffers[1].host[2, :, :3] = bad
    with pytest.raises(GenerationError, match="step 2, row 2"):
        next(steps)
    again = run(runner, PROMPTS)
    assert [row(again, index) for index in range(3)] == [reference(prompt, 20) for prompt in PROMPTS]


SHARED = random_prompt(8, 22)
QUESTIONS = tuple(SHARED + random_prompt(seed, size) for seed, size in ((11, 5), (12, 1), (13, 9), (14, 3)))


@pytest.mark.parametrize("kind", [*KINDS, "growing"])
def test_rows_with_shared_prefix_match_transformers(open_runner, reference, kind):
    runner = open_runner(**KINDS.get(kind, {"cache": "growing"}))
    engine = GenerationLoop(runner, shares=True)
    waiting, of_row = list(enumerate(QUESTIONS)), dict[int, int]()
    heard: list[list[int]] = [[] for _ in QUESTIONS]
    while waiting or of_row:
        while waiting and None in engine.rows:
            number, prompt = waiting.pop(0)
            of_row[engine.add_request(Request(prompt, greedy, 4 + 3 * number))] = number
        step = engine.step()
        assert step is not None
        for index, number in list(of_row.items()):
            heard[number] += step.tokens[index]
            if step.finish[index] is not None:
                engine.release_row(index)
                del of_row[index]
    assert heard == [reference(prompt, 4 + 3 * number) for number, prompt in enumerate(QUESTIONS)]
    assert engine.prefixes.reused_tokens or kind == "growing"


# Handmade packages: rows that have to be of equal length, draft tokens, patience


KEYS = ("key",)


def finish(engine: GenerationLoop) -> dict[int, list[int]]:
    """Tokens of each row until nothing is left to do."""
    found: dict[int, list[int]] = {}
    while (step := engine.step()) is not None:
        for row, tokens in enumerate(step.tokens):
            found.setdefault(row, []).extend(tokens)
    return found


@pytest.mark.parametrize("states", [KEYS, ALL], ids=["keys", "states"])
def test_batch_requiring_equal_row_lengths_accepts_a_single_sequence(opened, states, monkeypatch):
    """As GroupQueryAttention on WebGPU: every row of the batch receives the same tokens."""
    monkeypatch.setattr("partita.runtime.generate.executor._needs_even_rows", lambda loaded: True)
    runner = opened(batch=2, states=states)
    engine = GenerationLoop(runner)
    row = engine.add_request(Request(TEXTS[1], greedy, 5))
    with pytest.raises(GenerationError, match="no row of the batch is free"):
        engine.add_request(Request(TEXTS[2], greedy, 2))
    assert finish(engine)[row] == known_tokens(TEXTS[1], 5, states)
    for buffer in runner.cache.buffers:
        np.testing.assert_array_equal(*buffer.host)
    engine.release_row(row)
    again = engine.add_request(Request(TEXTS[2], greedy, 4))
    assert finish(engine)[again] == known_tokens(TEXTS[2], 4, states)


def drafts(text: list[int]):
    """Draft tokens from a text."""
    return lambda history, most: text[len(history) : len(history) + min(9, most)]


def test_draft_token_with_non_finite_values_does_not_change_the_result(opened):
    """A mask of zeros does not hide NaN, so the row is read again without drafts."""
    engine = GenerationLoop(opened(graph="felt", batch=2, states=KEYS))
    wanted = known_tokens(TEXTS[0], 17, KEYS)
    drafter = drafts([*TEXTS[0], *wanted[:3], *[BROKEN] * 14])
    row = engine.add_request(Request(TEXTS[0], greedy, 17, fails_alone=True, drafter=drafter))
    other = engine.add_request(Request(TEXTS[1], greedy, 20))
    found = finish(engine)
    assert found[row] == wanted and engine.row(row).error is None
    engine.release_row(row)
    again = engine.add_request(Request(TEXTS[0], greedy, 9))
    late = finish(engine)
    assert late[again] == known_tokens(TEXTS[0], 9, KEYS) and found[other] == known_tokens(TEXTS[1], 20, KEYS)


def test_accepted_draft_stop_token_ends_row(opened):
    engine = GenerationLoop(opened(batch=1, states=KEYS))
    wanted = [(TEXTS[2][-1] + 1 + count) % VOCAB for count in range(12)]
    drafter = drafts([*TEXTS[2], *wanted])
    row = engine.add_request(
        Request(TEXTS[2], lambda _, history: int(history[-1] + 1) % VOCAB, 12, frozenset({wanted[4]}), drafter=drafter)
    )
    assert finish(engine)[row] == wanted[:5] and engine.row(row).finish == "stop"
    assert engine.runner.cache.lengths[row] == engine.row(row).known - 1


@pytest.mark.parametrize("fewer", [False, True], ids=["all rows", "fewer rows"])
def test_patience_interleaves_decode_steps_with_prefill_chunks(opened, fewer):
    """Without patience, decoding rows wait for the prefill of a whole prompt."""
    for patience, longest in ((8, 1), (None, 3)):
        engine = GenerationLoop(
            opened(batch=2, states=KEYS, appends=not fewer, fewer=fewer), prefill_chunk=8, patience=patience
        )
        first = engine.add_request(Request(TEXTS[2], greedy, 20))
        heard = [step for _ in range(3) if (step := engine.step()) is not None]
        second = engine.add_request(Request(TEXTS[0], greedy, 6))  # three chunks
        while (step := engine.step()) is not None:
            heard.append(step)
        phases = "".join(step.phase[0] for step in heard).strip("d")
        assert max(map(len, phases[1:].replace("d", " ").split())) == longest, phases
        told = {row: [token for step in heard for token in step.tokens[row]] for row in (first, second)}
        assert told == {first: known_tokens(TEXTS[2], 20, KEYS), second: known_tokens(TEXTS[0], 6, KEYS)}


# Facts of a run: windows, steps, states and memory describe the run and are consistent


ASKED = list(range(5, 25))


def observed(runner, *, new=12, chunk=512, rows=1, take=None):
    steps = generate(runner, [ASKED] * rows, max_new_tokens=new, sampler=greedy, prefill_chunk=chunk)
    return [step for _, step in zip(range(take), steps, strict=False)] if take else list(steps)


def test_observation_window_has_prefill_and_four_decode_runs(open_runner):
    runner = open_runner(observe=True)
    steps = observed(runner)
    facts = run_facts(runner)
    assert [(w.phase, w.tokens) for w in facts.sessions[0].runs] == [("prefill", 20)] + [("decode", 1)] * 4
    assert [step.observed for step in steps] == [True] * 5 + [False] * (len(steps) - 5)
    assert [step.observed for step in facts.steps] == [step.observed for step in steps]
    windows = facts.sessions[0].runs
    assert all(a.start_us + a.host_us <= b.start_us for a, b in zip(windows, windows[1:], strict=False))
    for window in windows:
        inside = [event for event in facts.sessions[0].events if event.run == window.run]
        assert [event.order for event in inside] == list(range(len(inside)))
        assert sum(event.host_us for event in inside) <= window.host_us


def test_run_records_its_number_of_rows(open_runner):
    runner = open_runner(observe=True, batch_size=3)
    assert len(list(serve(runner, [Request(ASKED, greedy, 3)] * 2, records=True))) == 3
    facts = run_facts(runner)
    assert [(run.phase, run.tokens, run.rows) for run in facts.sessions[0].runs] == [
        ("prefill", 20, 2),
        ("decode", 1, 2),
        ("decode", 1, 2),
    ]
    index = SessionIndex(facts.sessions[0])
    assert (node_times(index, "prefill", 3).tokens, node_times(index, "decode", 3).tokens) == (40, 2)
    states = [state for state in facts.states if state.checked_steps]
    assert states and all(state.same_address and not state.address_changes for state in states)


@pytest.mark.parametrize("spec", [{"attention": "onnx24"}, {"precision": "fp16"}, PAIR])
def test_past_and_present_share_a_buffer(open_runner, spec):
    runner = open_runner(observe=True, **spec)
    before = [buffer.address() for buffer in runner.cache.buffers]
    observed(runner)
    assert [buffer.address() for buffer in runner.cache.buffers] == before
    facts = run_facts(runner)
    assert len(facts.states) == 2 * BASE["num_hidden_layers"]
    assert all(state.same_address and state.address_changes == 0 for state in facts.states)
    assert all(state.memory == "Cpu" for state in facts.states)
    assert all(buffer.host[:, :, :20].any() for buffer in runner.cache.buffers)
    assert facts.memory.cache_bytes == runner.contract.cache_bytes


def test_failed_run_ends_window_and_preserves_earlier_events(open_runner):
    runner = open_runner(observe=True)
    observed(runner, take=3)
    feed = runner.bound("decode", 1, 1)
    feed.tokens.fill(10_000)
    with pytest.raises(GenerationError):
        feed.run()
    (session,) = run_facts(runner).sessions
    assert len(session.runs) == 3
    assert {event.run for event in session.events} == {0, 1, 2}


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"streams": 3}', "[]", '[{"cat" : "Node"', "[3]"])
def test_unparsable_plan_and_profile_are_empty_with_a_note(text):
    assert parse_plan(text) == (None, None)
    assert parse_profile(text, [("run", 0)]) == ((), ())
    assert len(unread_profile(1, ())) == 1 and unread_profile(0, ()) == ()
