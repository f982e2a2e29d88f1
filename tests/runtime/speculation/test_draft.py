"""A draft model reads what the row has, goes back by what was wrong, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from partita.options.sampling import Sampling
from partita.runtime.engine.loop import serve
from partita.runtime.engine.planner import StepPlan
from partita.runtime.engine.request import Request
from partita.runtime.runner import Runner
from partita.runtime.sampling import Draws, make_sampler
from partita.runtime.speculation.draft import DraftModel
from partita.runtime.speculation.eligibility import why_no_draft, why_not
from tests.runtime.handmade import ALL, LENGTH, VOCAB, known_logits, known_tokens

PROMPT = [(5 * i + 1) % VOCAB for i in range(12)]
KEYS = ("key",)
Opened = Callable[..., Runner]


@pytest.fixture
def opened(opened: Opened) -> Opened:
    """Packages with keys and values alone."""
    return lambda **options: opened(**{"states": KEYS, **options})


def drafted(drafter: DraftModel, text: list[int], most: int = 4) -> list[int]:
    return drafter(np.array(text, np.int64), most)


@pytest.mark.parametrize("shapes", ["any", "pair", "one"])
def test_a_draft_goes_on_as_it_would_by_itself_whatever_it_drafted_before(opened: Opened, shapes: str) -> None:
    drafter = DraftModel(opened(shapes=shapes), VOCAB)
    assert drafted(drafter, PROMPT, 0) == []
    text = [*PROMPT]
    for added in ([7], [7, 9], [], [3] * 5, known_tokens([*PROMPT, 7, 7, 9, 3, 3, 3, 3, 3], 3, KEYS)):
        text += added
        found = drafted(drafter, text)
        assert found and found == known_tokens(text, len(found), KEYS)
    assert drafted(drafter, text[:14]) == known_tokens(text[:14], len(drafted(drafter, text[:14])), KEYS)


def test_a_draft_reads_what_it_missed_in_one_run(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = opened()
    drafter, runs, run = DraftModel(executor, VOCAB), list[int](), executor.run

    def noted(plan: StepPlan, *rest: Any) -> Any:
        runs.append(plan.new_tokens)
        return run(plan, *rest)

    monkeypatch.setattr(executor, "run", noted)
    text = np.array(PROMPT, np.int64)
    assert drafter(text, 0) == [] and runs == [len(PROMPT)], "0 tokens: it reads the prompt"
    assert drafter(text, 1) and runs[1:] == [1], "the last token gives the logits"
    longer = np.append(text, [3, 4, 5])
    assert drafter(longer, 1) and runs[2:] == [3]
    longer[len(text)] = 9
    assert drafter(longer, 1) and runs[3:] == [3], "another token stands there now"


def test_a_draft_whose_cache_cannot_be_rewound_reads_anew(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = opened()
    drafter, runs, run = DraftModel(executor, VOCAB), list[int](), executor.run
    assert drafted(drafter, PROMPT)

    def noted(plan: StepPlan, *rest: Any) -> Any:
        runs.append(plan.new_tokens)
        return run(plan, *rest)

    monkeypatch.setattr(executor, "run", noted)
    monkeypatch.setattr(executor.cache, "rewind", lambda row, tokens: not tokens)
    text = [*PROMPT[:3], 9, *PROMPT[4:], *range(8)]
    assert drafted(drafter, text, 1) == known_tokens(text, 1, KEYS) and runs == [len(text)]


def test_a_draft_with_a_shorter_cache_ends_where_it_is_full(opened: Opened) -> None:
    drafter = DraftModel(opened(), VOCAB)
    full = [*known_tokens(PROMPT, LENGTH, KEYS)][:LENGTH]
    assert len(drafted(drafter, full)) == 1, "the token after the last one that it holds"
    assert drafted(drafter, [*full, 4]) == []


def test_tokens_that_the_larger_model_does_not_have_are_not_drafted(opened: Opened) -> None:
    drafter = DraftModel(opened(), 1)
    assert drafted(drafter, PROMPT) == ([0] * 4 if known_tokens(PROMPT, 1, KEYS) == [0] else [])


def test_a_package_that_cannot_draft_says_why(opened: Opened) -> None:
    assert why_no_draft(opened()) is None and why_no_draft(opened(shapes="pair")) is None
    for options, says in (
        ({"batch": 2}, "its batch size is 2"),
        ({"graph": "rope"}, "rotary frequencies"),
        ({"states": ALL}, "take in every token"),
    ):
        assert says in str(why_no_draft(opened(**options)))


def test_what_is_drawn_has_the_distribution_of_the_model_and_not_of_its_draft(opened: Opened) -> None:
    """The second token of 3,000 draws against its exact distribution, by chi-squared; with a seed the same tokens."""
    runner, draft = opened(), opened()
    drafter = DraftModel(draft, VOCAB)

    def drawn(sampler: object, speculates: bool) -> tuple[int, ...]:
        request = Request(PROMPT, sampler, 3, drafter=drafter if speculates else None)  # type: ignore[arg-type]
        return tuple(token for step in serve(runner, [request]) for token in step.tokens[0])

    sampler = make_sampler(Sampling(40.0, top_k=4, seed=5))
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
    again = [drawn(make_sampler(Sampling(40.0, top_k=4, seed=seed)), True) for seed in range(20)]
    assert again == [drawn(make_sampler(Sampling(40.0, top_k=4, seed=seed)), False) for seed in range(20)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"states": ALL}, "conv and recurrent states (past.*"),
        ({"shapes": "pair"}, "fixed number of tokens; export without `static_shapes`"),
        ({"shapes": "one"}, "fixed number of tokens"),
        ({"appends": False, "batch": 2}, "at batch size 2 its attention takes one token at a time"),
        ({"rereads_at": 20, "graph": "rope"}, "cached keys do not hold beyond 20 tokens"),
        ({"graph": "rope"}, "its rotary frequencies depend on the length of the text"),
    ],
)
def test_a_package_that_cannot_verify_draft_tokens_is_refused_by_name(
    opened: Opened, options: dict[str, object], says: str | None
) -> None:
    found = why_not(opened(**options))
    assert (found is None) if says is None else (found is not None and says.partition("*")[0] in found), found
