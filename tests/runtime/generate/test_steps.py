"""Token loop over real sessions: tokens match for any chunk size and batch, and end reasons are correct."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.engine_steps import generate
from partita.errors import GenerationError
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from tests.conftest import BASE


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


def test_steps_record_phase_and_token_count(open_runner):
    runner = open_runner()
    steps = run(runner, [PROMPTS[0]], new=4, chunk=8)
    assert [(step.phase, step.new_tokens) for step in steps] == [("prefill", n) for n in (8, 8, 4)] + [
        ("decode", 1)
    ] * 3
    assert [step.tokens[0] == () for step in steps] == [True, True, False, False, False, False]


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
