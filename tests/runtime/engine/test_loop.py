"""The loop over real sessions: requests join and leave, each with its own sampler and end, and others do not notice."""

from __future__ import annotations

import numpy as np
import pytest

from partita.errors import GenerationError
from partita.providers.resolve import parse_chain
from partita.runtime.engine.loop import Engine, serve
from partita.runtime.engine.recorder import Recorder
from partita.runtime.engine.request import Request
from partita.runtime.runner import Runner, load_runner
from partita.runtime.sampling import greedy
from tests.runtime.handmade import ALL, VOCAB, handmade, known_logits, known_tokens

PROMPTS = [[(5 * i + 1) % VOCAB for i in range(20)], [(11 * i + 2) % VOCAB for i in range(6)], [9, 4, 33]]
KEYS, STATES = ("key",), ALL


@pytest.fixture
def opened(tmp_path):
    """Make a package and open it on the CPU provider."""
    runners: list[Runner] = []

    def factory(**options):
        runner = load_runner(handmade(tmp_path / str(len(runners)), **options), parse_chain("cpu"), threads=1)
        runners.append(runner)
        return runner

    yield factory
    for runner in runners:
        runner.close()


def finish(engine: Engine) -> dict[int, list[int]]:
    """Tokens of each row until nothing is left to do."""
    found: dict[int, list[int]] = {}
    while (step := engine.step()) is not None:
        for row, tokens in enumerate(step.tokens):
            found.setdefault(row, []).extend(tokens)
    return found


@pytest.mark.parametrize("states", [KEYS, STATES], ids=["keys", "states"])
@pytest.mark.parametrize("shapes", ["one", "pair"])
def test_a_request_that_joins_others_at_work_changes_nothing_for_anybody(opened, states, shapes):
    engine = Engine(opened(batch=2, states=states, shapes=shapes).executor)
    first = engine.join(Request(PROMPTS[0], greedy, 12))
    early = [step for _ in range(6) if (step := engine.step()) is not None]
    second = engine.join(Request(PROMPTS[1], greedy, 5))
    late = finish(engine)
    tokens = [token for step in early for token in step.tokens[first]] + late[first]
    assert tokens == known_tokens(PROMPTS[0], 12, states)
    assert late[second] == known_tokens(PROMPTS[1], 5, states)


@pytest.mark.parametrize("states", [KEYS, STATES], ids=["keys", "states"])
def test_a_row_that_left_is_used_again(opened, states):
    engine = Engine(opened(batch=2, states=states).executor)
    first = engine.join(Request(PROMPTS[0], greedy, 30))
    other = engine.join(Request(PROMPTS[1], greedy, 8))
    heard: list[int] = []
    for _ in range(4):
        step = engine.step()
        assert step is not None
        heard += step.tokens[other]
    engine.leave(first)  # in the middle
    again = engine.join(Request(PROMPTS[2], greedy, 4))
    assert again == first
    late = finish(engine)
    assert late[again] == known_tokens(PROMPTS[2], 4, states)
    assert heard + late[other] == known_tokens(PROMPTS[1], 8, states)


def test_each_request_has_its_own_sampler_stop_set_and_budget(opened):
    runner = opened(batch=3, states=KEYS)
    wanted = known_tokens(PROMPTS[1], 6, KEYS)
    requests = [
        Request(PROMPTS[0], lambda logits, history: 7, 3),
        Request(PROMPTS[1], greedy, 20, frozenset({wanted[2]})),
        Request(PROMPTS[2], greedy, 1),
    ]
    steps = list(serve(runner.executor, requests))
    tokens = [[token for step in steps for token in step.tokens[row]] for row in range(3)]
    assert tokens[0] == [7, 7, 7] and tokens[1] == wanted[: wanted.index(wanted[2]) + 1] and len(tokens[2]) == 1
    assert steps[-1].finish == ("length", "stop", "length")


def test_a_next_turn_goes_on_in_the_cache(opened):
    """What a chat does: more tokens are read after an answer, and nothing before them again."""
    engine = Engine(opened(batch=1).executor)
    row = engine.join(Request(PROMPTS[1]))
    assert finish(engine) == {0: []}
    engine.extend(row, PROMPTS[2])
    step = engine.step()
    assert step is not None and step.new_tokens == len(PROMPTS[2]) and step.phase == "prefill"


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("shapes", ["one", "pair"])
def test_a_listener_hears_the_logits_of_every_token(opened, shapes, chunk):
    heard: dict[int, np.ndarray] = {}
    request = Request(PROMPTS[0], greedy, 5, listener=lambda position, logits: heard.update({position: logits.copy()}))
    list(serve(opened(shapes=shapes).executor, [request], prefill_chunk=chunk))
    text = [*PROMPTS[0], *known_tokens(PROMPTS[0], 4)]
    # The prefill graph of the pair gives the logits of one position.
    assert sorted(heard) == ([4, 9, 14, *range(19, 24)] if shapes == "pair" else list(range(len(text))))
    wanted = known_logits(text)
    for position, logits in heard.items():
        np.testing.assert_allclose(logits, wanted[position], rtol=1e-4, atol=1e-3)


def test_going_back_is_free_with_keys_and_refused_with_a_state(opened):
    """Speculation: tokens that turn out wrong are taken back."""
    engine = Engine(opened(batch=1, states=KEYS).executor)
    row = engine.join(Request(PROMPTS[0]))
    finish(engine)
    cache = engine.executor.cache
    assert cache.rewind(row, 5) and cache.filled[row] == 15
    assert not cache.rewind(row, 16) and cache.filled[row] == 15
    entry = engine.row(row)
    entry.known = 15
    engine.extend(row, PROMPTS[0][15:])
    entry.request = Request(PROMPTS[0], greedy, 3)
    assert finish(engine)[row] == known_tokens(PROMPTS[0], 3, KEYS)
    recurrent = opened(batch=1, states=STATES).executor
    list(serve(recurrent, [Request(PROMPTS[0])]))
    assert not recurrent.cache.rewind(0, 1) and recurrent.cache.filled[0] == 20


def test_steps_are_told_to_whoever_observes(opened):
    recorder = Recorder()
    steps = list(serve(opened(batch=2).executor, [Request(p, greedy, 2) for p in PROMPTS[:2]], observers=(recorder,)))
    assert recorder.steps == steps and recorder.prompt_tokens == 20


def test_a_full_batch_and_a_bad_prompt_are_refused_by_name(opened):
    engine = Engine(opened(batch=1).executor)
    with pytest.raises(GenerationError, match="token id 999"):
        engine.join(Request([999]))
    engine.join(Request([1]))
    with pytest.raises(GenerationError, match="no row of the batch is free"):
        engine.join(Request([1]))
