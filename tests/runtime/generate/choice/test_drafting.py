"""Speculative decoding: draft packages, n-gram lookup, number of draft tokens. Output does not change."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from partita.library.engine.drafters import DraftModel
from partita.options.generation import Sampling
from partita.runtime.generate.choice.drafting import (
    EMPTY_STEPS,
    OFF_STEPS,
    DraftLength,
    VerifiedDraft,
    ngram_draft,
    no_draft_reason,
    no_speculation_reason,
)
from partita.runtime.generate.choice.sampling import Draws, make_sampler
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import Runner
from tests.runtime.handmade_packages import ALL, LENGTH, VOCAB, known_logits, known_tokens

PROMPT = [(5 * i + 1) % VOCAB for i in range(12)]
KEYS = ("key",)
Opened = Callable[..., Runner]


@pytest.fixture
def opened(opened: Opened) -> Opened:
    """Packages with keys and values alone."""
    return lambda **options: opened(**{"states": KEYS, **options})


def drafted(drafter: DraftModel, text: list[int], most: int = 4) -> list[int]:
    return drafter(np.array(text, np.int64), most)


def test_draft_model_stops_at_its_cache_length(opened: Opened) -> None:
    drafter = DraftModel(opened(), VOCAB)
    full = [*known_tokens(PROMPT, LENGTH, KEYS)][:LENGTH]
    assert len(drafted(drafter, full[:-1])) == 1, "the last token that it holds"
    assert drafted(drafter, full) == drafted(drafter, [*full, 4]) == []


def test_tokens_outside_target_vocabulary_are_not_drafted(opened: Opened) -> None:
    drafter = DraftModel(opened(), 1)
    assert drafted(drafter, PROMPT) == ([0] * 4 if known_tokens(PROMPT, 1, KEYS) == [0] else [])


def test_speculative_sampling_keeps_distribution_of_target_model(opened: Opened) -> None:
    """Chi-squared test of the second of 3,000 sampled tokens; with a seed, the tokens are those without a draft."""
    runner, draft = opened(), opened()
    drafter = DraftModel(draft, VOCAB)

    def drawn(sampler: object, speculates: bool) -> tuple[int, ...]:
        request = Request(PROMPT, sampler, 3, drafter=drafter if speculates else None)  # type: ignore[arg-type]
        return tuple(token for step in serve(runner, [request]) for token in step.tokens[0])

    sampler = make_sampler(Sampling(temperature=40.0, top_k=4, seed=5))
    found = [drawn(sampler, True) for _ in range(3000)]
    first = max({tokens[0] for tokens in found}, key=[tokens[0] for tokens in found].count)
    seconds = [tokens[1] for tokens in found if tokens[0] == first]
    places, weights = Draws(lambda: 0.5, 40.0, top_k=4).distribution(
        known_logits([*PROMPT, first], KEYS)[-1], np.zeros(0, np.int64)
    )
    wanted = np.zeros(VOCAB)
    wanted[places] = len(seconds) * weights / weights.sum()
    counts = np.bincount(seconds, minlength=VOCAB)
    assert not counts[wanted == 0].any()
    likely = wanted > 0
    assert float((((counts - wanted) ** 2)[likely] / wanted[likely]).sum()) < 16.3, "3 degrees of freedom, 0.1 percent"
    again = [drawn(make_sampler(Sampling(temperature=40.0, top_k=4, seed=seed)), True) for seed in range(20)]
    assert again == [drawn(make_sampler(Sampling(temperature=40.0, top_k=4, seed=seed)), False) for seed in range(20)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"states": ALL}, "its states cannot be rewound: past"),
        ({"shapes": "pair"}, "export without `static_shapes`"),
        ({"appends": False, "batch": 2}, "with `batch_size=1` or `attention=onnx24`"),
        ({"graph": "rope"}, "its rotary frequencies depend on the length of the text"),
    ],
)
def test_no_speculation_reason_names_obstacle(opened: Opened, options: dict[str, object], says: str | None) -> None:
    runner = opened(**options)
    found = no_speculation_reason(runner)
    assert (found is None) if says is None else (found is not None and says in found), found
    as_draft = no_draft_reason(runner)  # a draft needs batch size 1, but may have two graphs
    assert as_draft == ("its batch size is 2, but a draft package needs 1" if "batch" in options else None) or (
        as_draft == found and "shapes" not in options
    )


def simulate(rate: float, slope: float, steps: int, seed: int = 0) -> tuple[float, list[int]]:
    """Speedup over decoding without drafts, and the draft tokens of each step. `slope`: cost of a draft token, in
    steps without any."""
    control, draws, counts, tokens, seconds = DraftLength(), random.Random(seed), [], 0, 0.0
    for _ in range(steps):
        count = control.count()
        accepted = 0
        while accepted < count and draws.random() < rate:
            accepted += 1
        took = 0.001 * (1 + slope * count) * draws.uniform(0.97, 1.03)
        control.record(count, took, [VerifiedDraft(count, accepted)] if count else [])
        counts.append(count)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    return tokens * 0.001 / seconds, counts


@pytest.mark.parametrize(
    ("rate", "slope", "least"), [(0.95, 0.05, 3.0), (0.9, 0.2, 1.5), (0.6, 0.05, 1.6)], ids=["copy", "fp32", "GPU"]
)
def test_accepted_draft_tokens_make_decode_faster(rate: float, slope: float, least: float) -> None:
    assert simulate(rate, slope, 600)[0] > least


@pytest.mark.parametrize(("rate", "slope"), [(0.0, 0.05), (0.0, 0.4), (0.2, 0.4), (0.5, 0.6)])
def test_rejected_draft_tokens_cost_at_most_four_percent(rate: float, slope: float) -> None:
    speedup, counts = simulate(rate, slope, 2000)
    assert speedup > 0.96
    assert slope < 0.3 or sum(map(bool, counts)) < 2000 / 10


def test_drafting_pauses_after_a_slowdown_and_resumes() -> None:
    counts = simulate(0.0, 0.4, 200)[1]
    tries = [step for step, count in enumerate(counts) if count]
    gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert {gap for gap in gaps if gap > 3} == {OFF_STEPS + 1} or min(gap for gap in gaps if gap > 3) > OFF_STEPS


def test_drafting_pauses_after_three_empty_drafts() -> None:
    control = DraftLength()
    for _ in range(3):
        control.count()
        control.record(0, 0.001, [])
    tried = []
    for step in range(20):
        tried += [step] if control.count() else []
        control.record(0, 0.001, [])
    assert tried[1] - tried[0] == EMPTY_STEPS + 1, "once in nine steps"


@pytest.mark.parametrize(
    ("text", "most", "found"),
    [
        ([1, 2, 3, 9, 8, 7, 6, 2, 3, 5, 5, 1, 2, 3], 4, [9, 8, 7, 6]),  # the longest match, not the latest
        ([2, 3, 9, 0, 2, 3, 8, 1, 2, 3], 2, [8, 1]),  # the latest of equal matches
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([4, 5, 6, 1, 5], 4, []),  # one token is no match
        ([1, 2, 1, 2], 0, []),
        ([7, 1, 2, 3, 1, 2, 3], 8, [1, 2, 3, 1, 2, 3, 1, 2]),  # a repetition goes on past the end of the text
        ([5, 4, 4, 4], 3, [4, 4, 4]),
    ],
)
def test_ngram_drafter_continues_longest_match(text: list[int], most: int, found: list[int]) -> None:
    assert ngram_draft(np.array(text, np.int64), most) == found
