"""GenerationLoop over real sessions: requests join and end independently, each with its own sampler."""

from __future__ import annotations

import numpy as np
import pytest

from partita.errors import GenerationError
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Request
from tests.runtime.handmade_packages import ALL, BROKEN, PROMPTS, VOCAB, known_tokens

KEYS, STATES = ("key",), ALL


def finish(engine: GenerationLoop) -> dict[int, list[int]]:
    """Tokens of each row until nothing is left to do."""
    found: dict[int, list[int]] = {}
    while (step := engine.step()) is not None:
        for row, tokens in enumerate(step.tokens):
            found.setdefault(row, []).extend(tokens)
    return found


@pytest.mark.parametrize("states", [KEYS, STATES], ids=["keys", "states"])
def test_batch_requiring_equal_row_lengths_accepts_a_single_sequence(opened, states, monkeypatch):
    """As GroupQueryAttention on WebGPU: every row of the batch receives the same tokens."""
    monkeypatch.setattr("partita.runtime.generate.executor._needs_even_rows", lambda loaded: True)
    runner = opened(batch=2, states=states)
    engine = GenerationLoop(runner)
    row = engine.add_request(Request(PROMPTS[1], greedy, 5))
    with pytest.raises(GenerationError, match="no row of the batch is free"):
        engine.add_request(Request(PROMPTS[2], greedy, 2))
    assert finish(engine)[row] == known_tokens(PROMPTS[1], 5, states)
    for buffer in runner.cache.buffers:
        np.testing.assert_array_equal(*buffer.host)
    engine.release_row(row)
    again = engine.add_request(Request(PROMPTS[2], greedy, 4))
    assert finish(engine)[again] == known_tokens(PROMPTS[2], 4, states)


class Drafts:
    """Draft tokens from a known text, wrong at some places."""

    def __init__(self, text: list[int], wrong: frozenset[int] = frozenset(), most: int = 4) -> None:
        self.text, self.wrong, self.most, self.asked = text, wrong, most, 0

    def __call__(self, history: np.ndarray, most: int) -> list[int]:
        self.asked += bool(most)
        places = range(len(history), min(len(history) + min(self.most, most), len(self.text)))
        return [(self.text[place] + (place in self.wrong)) % VOCAB for place in places]


@pytest.mark.parametrize("wrong", [(), (22, 23, 29), tuple(range(60))], ids=["right", "sometimes", "never"])
def test_draft_tokens_reduce_steps_without_changing_output(opened, wrong):
    engine = GenerationLoop(opened(batch=2, states=KEYS))
    wanted = known_tokens(PROMPTS[0], 17, KEYS)
    drafts = Drafts([*PROMPTS[0], *wanted], frozenset(wrong))
    row = engine.add_request(Request(PROMPTS[0], greedy, 17, drafter=drafts))
    other = engine.add_request(Request(PROMPTS[1], greedy, 9))
    steps = []
    while (step := engine.step()) is not None:
        steps.append(step)
        assert engine.runner.cache.lengths[row] == engine.row(row).known - 1
    told = {index: [token for step in steps for token in step.tokens[index]] for index in (row, other)}
    assert told == {row: wanted, other: known_tokens(PROMPTS[1], 9, KEYS)}
    decode = [step for step in steps if step.phase == "decode"]
    assert sum(step.accepted for step in steps) == sum(max(len(step.tokens[row]) - 1, 0) for step in decode)
    assert sum(len(step.tokens[row]) for step in decode) == 16
    if not wrong:
        assert max(len(step.tokens[row]) for step in decode) == 5 and all(
            step.accepted == step.drafted for step in steps
        )
    elif len(wrong) == 60:
        assert not any(step.accepted for step in steps) and sum(step.drafted for step in steps) > 40


def test_draft_token_with_non_finite_values_does_not_change_the_result(opened):
    """A mask of zeros does not hide NaN, so the row is read again without drafts."""
    engine = GenerationLoop(opened(graph="felt", batch=2, states=KEYS))
    wanted = known_tokens(PROMPTS[0], 17, KEYS)
    drafter = Drafts([*PROMPTS[0], *wanted[:3], *[BROKEN] * 14])
    row = engine.add_request(Request(PROMPTS[0], greedy, 17, fails_alone=True, drafter=drafter))
    other = engine.add_request(Request(PROMPTS[1], greedy, 20))
    found = finish(engine)
    assert found[row] == wanted and engine.row(row).error is None
    engine.release_row(row)
    again = engine.add_request(Request(PROMPTS[0], greedy, 9))
    late = finish(engine)
    assert late[again] == known_tokens(PROMPTS[0], 9, KEYS) and found[other] == known_tokens(PROMPTS[1], 20, KEYS)


def test_accepted_draft_stop_token_ends_row(opened):
    engine = GenerationLoop(opened(batch=1, states=KEYS))
    wanted = [(PROMPTS[2][-1] + 1 + count) % VOCAB for count in range(12)]
    asked = Drafts([*PROMPTS[2], *wanted], most=9)
    row = engine.add_request(
        Request(PROMPTS[2], lambda _, history: int(history[-1] + 1) % VOCAB, 12, frozenset({wanted[4]}), drafter=asked)
    )
    assert finish(engine)[row] == wanted[:5] and engine.row(row).finish == "stop" and asked.asked == 1
    assert engine.runner.cache.lengths[row] == engine.row(row).known - 1


@pytest.mark.parametrize(
    "options", [{"states": STATES}, {"states": KEYS, "shapes": "pair"}, {"states": KEYS, "appends": False}]
)
def test_no_draft_tokens_if_a_step_cannot_verify_them(opened, options):
    engine = GenerationLoop(opened(**options))
    wanted = known_tokens(PROMPTS[0], 8, options["states"])
    engine.add_request(Request(PROMPTS[0], greedy, 8, drafter=Drafts([*PROMPTS[0], *wanted])))
    steps = []
    while (step := engine.step()) is not None:
        steps.append(step)
    assert [token for step in steps for token in step.tokens[0]] == wanted
    assert not any(step.drafted for step in steps)


@pytest.mark.parametrize("place", [0, 2], ids=["first row", "last row"])
def test_single_active_row_drafts_if_several_rows_cannot(opened, place):
    """The graph takes one token per row for several rows, and several tokens for a single row."""
    engine = GenerationLoop(opened(batch=3, states=KEYS, appends=False, fewer=True))
    budgets = [17 if row == place else 4 + row for row in range(3)]
    asked: list[list[int]] = [[], [], []]

    def drafter(row: int, known: list[int]) -> Drafts:
        class Counted(Drafts):
            def __call__(self, history: np.ndarray, most: int) -> list[int]:
                asked[row].append(most)
                return super().__call__(history, most)

        return Counted(known, frozenset({13, 29}))

    wanted = [known_tokens(prompt, count, KEYS) for prompt, count in zip(PROMPTS, budgets, strict=True)]
    for row, (prompt, count) in enumerate(zip(PROMPTS, budgets, strict=True)):
        engine.add_request(Request(prompt, greedy, count, drafter=drafter(row, [*prompt, *wanted[row]])))
    found: list[list[int]] = [[], [], []]
    alone = []
    while (step := engine.step()) is not None:
        for row, tokens in enumerate(step.tokens):
            found[row] += tokens
        going = [row for row in range(3) if engine.row(row).finish is None]
        if len(going) > 1:
            assert not any(asked) and not step.drafted
        alone += [step] if step.drafted else []
    assert found == wanted
    assert asked[place] and not any(asked[row] for row in range(3) if row != place)
    assert alone and 0 < sum(step.accepted for step in alone) < sum(step.drafted for step in alone)
    resting = 2 - place  # what it has in the cache is as it was
    assert engine.runner.cache.lengths[resting] == engine.row(resting).known - 1


@pytest.mark.parametrize("fewer", [False, True], ids=["all rows", "fewer rows"])
def test_patience_interleaves_decode_steps_with_prefill_chunks(opened, fewer):
    """Without patience, decoding rows wait for the prefill of a whole prompt."""
    for patience, longest in ((8, 1), (None, 3)):
        engine = GenerationLoop(
            opened(batch=2, states=KEYS, appends=not fewer, fewer=fewer), prefill_chunk=8, patience=patience
        )
        first = engine.add_request(Request(PROMPTS[2], greedy, 20))
        heard = [step for _ in range(3) if (step := engine.step()) is not None]
        second = engine.add_request(Request(PROMPTS[0], greedy, 6))  # three chunks
        while (step := engine.step()) is not None:
            heard.append(step)
        phases = "".join(step.phase[0] for step in heard).strip("d")
        assert max(map(len, phases[1:].replace("d", " ").split())) == longest, phases
        told = {row: [token for step in heard for token in step.tokens[row]] for row in (first, second)}
        assert told == {first: known_tokens(PROMPTS[2], 20, KEYS), second: known_tokens(PROMPTS[0], 6, KEYS)}


def test_last_bound_returns_the_profiled_decode_binding(opened):
    """The last steps cover fewer rows, with smaller buffers than the profiled steps."""
    runner = opened(observe=True, batch=4, states=KEYS, appends=False, fewer=True)
    engine = GenerationLoop(runner)
    for count in (8, 8, 8, 12):
        engine.add_request(Request(PROMPTS[2], greedy, max_new_tokens=count))
    finish(engine)
    graphs = (runner.last_bound("decode"), runner._bound["decode", 0])
    assert [graph.binding.buffers["logits"].size_bytes for graph in graphs] == [4 * VOCAB * 4, VOCAB * 4]
