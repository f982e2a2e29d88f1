"""What guesses of what follows have come to: part of the schema `partita.report/1`, computed from the steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from partita.observations.facts import SpeculationFact, StepFact
from partita.observations.records import Record


class GuessedWidth(Record):
    """The decode steps that were fed so many tokens."""

    width: int
    """Tokens that each row was fed: its last one, and guesses."""
    steps: int
    tokens: int
    """New tokens over all rows."""
    step_p50_ms: float
    """Median wall time of a step, without the time in which guesses were made."""


class Speculation(Record):
    """Guesses of what follows, confirmed by decode steps. Profiled steps have none, and are left out."""

    kind: Literal["ngram", "draft"]
    """From the row's own text and earlier answers, or by a draft model."""
    draft: str | None
    """Name of the package that drafts; null where none does."""
    steps: int
    """Decode steps that were not profiled."""
    guessing_steps: int
    """Those that were fed guesses."""
    declined_steps: int
    """Those that could have been, and guesses were not worth it by what had been measured."""
    guessed: int
    """Guesses that were fed."""
    confirmed: int
    """Those that were right."""
    acceptance: float | None
    """`confirmed` of `guessed`; null without guesses."""
    tokens: int
    """New tokens over all rows."""
    tokens_per_step: float | None
    seconds: float
    """Wall time of the steps."""
    guess_seconds: float
    """Part of it in which guesses were made and chosen, the draft's runs included."""
    plain_token_ms: float | None
    """What a token takes without guesses: the median over steps without any, less the time in which some were looked
    for; null when there was no such step.
    """
    gain: float | None
    """Speed by that of steps without guesses of as many rows: what the tokens would have taken by the median of these,
    by what they took; null when not known.
    """
    widths: tuple[GuessedWidth, ...]


def speculation_figures(fact: SpeculationFact | None, steps: Sequence[StepFact]) -> Speculation | None:
    """The figures of a generation; None where nobody guessed."""
    if fact is None:
        return None
    made = [step for step in steps if step.phase == "decode" and not step.observed]
    plain = [_own_seconds(step) / _tokens(step) for step in _plain(made)]
    tokens, guessed = sum(map(_tokens, made)), sum(step.guessed for step in made)
    confirmed = sum(step.confirmed for step in made)
    seconds = sum(step.seconds + step.overhead_seconds for step in made)
    token = statistics.median(plain) if plain else None
    return Speculation(
        kind=fact.kind,
        draft=fact.draft,
        steps=len(made),
        guessing_steps=sum(bool(step.guessed) for step in made),
        declined_steps=sum(step.declined for step in made),
        guessed=guessed,
        confirmed=confirmed,
        acceptance=confirmed / guessed if guessed else None,
        tokens=tokens,
        tokens_per_step=tokens / len(made) if made else None,
        seconds=seconds,
        guess_seconds=sum(step.guess_seconds for step in made),
        plain_token_ms=None if token is None else 1000 * token,
        gain=_gain(made),
        widths=tuple(_of_width(width, made) for width in sorted({step.width for step in made})),
    )


def rows_of(found: Speculation) -> int:
    """Rows that took part in the steps, all together: each got a token in each, besides those of right guesses."""
    return found.tokens - found.confirmed


def _gain(steps: Sequence[StepFact]) -> float | None:
    """How fast these steps were, by those of them without guesses: rows beside each other share a step's time, so each
    is compared with those of as many. None where there is nothing to compare with.
    """
    by_rows: dict[int, list[StepFact]] = {}
    for step in steps:
        if not step.guessed and _tokens(step):
            by_rows.setdefault(_rows(step), []).append(step)
    alike = {rows: statistics.median(map(_own_seconds, _plain(those))) for rows, those in by_rows.items()}
    compared = [step for step in steps if _rows(step) in alike]
    took = sum(step.seconds + step.overhead_seconds for step in compared)
    without = sum(_tokens(step) / _rows(step) * alike[_rows(step)] for step in compared)
    return without / took if took > 0 else None


def _plain(steps: Sequence[StepFact]) -> Sequence[StepFact]:
    """Those that a generation without guesses has: not looked for, either, where there are any such. A look makes the
    step after it longer.
    """
    without = [step for step in steps if not step.guessed and _tokens(step)]
    return [step for step in without if not step.looked] or without


def _rows(step: StepFact) -> int:
    """Rows that took part: each got a token, and those of its guesses that were right."""
    return _tokens(step) - step.confirmed


def _of_width(width: int, steps: Sequence[StepFact]) -> GuessedWidth:
    own = [step for step in steps if step.width == width]
    median = statistics.median(map(_own_seconds, own))
    return GuessedWidth(width=width, steps=len(own), tokens=sum(map(_tokens, own)), step_p50_ms=1000 * median)


def _own_seconds(step: StepFact) -> float:
    """Wall time of a step without that in which guesses were made."""
    return step.seconds + step.overhead_seconds - step.guess_seconds


def _tokens(step: StepFact) -> int:
    return step.tokens if step.row_tokens is None else step.row_tokens
