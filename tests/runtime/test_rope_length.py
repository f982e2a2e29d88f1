"""rope_length of each step, and recomputation above the limit; see handmade_packages.py for the logits."""

from __future__ import annotations

import pytest

from benchmarks.engine_steps import generate
from partita.providers.resolve import parse_chain
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from partita.runtime.generate.run_facts import run_facts
from partita.runtime.generate.runner import load_runner
from partita.runtime.verify.replay import replay
from tests.runtime.handmade_packages import PHASES, handmade

CPU = parse_chain("cpu")
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
