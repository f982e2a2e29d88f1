"""Figures of speculative decoding: part of the schema `partita.report/1`, computed from the steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from partita.observations.facts import SpeculationFact, StepFact
from partita.observations.records import Record


class DraftedWidth(Record):
    """Decode steps of one width."""

    width: int
    """Input tokens per row: its last token and draft tokens."""
    steps: int
    tokens: int
    """New tokens of all rows."""
    step_p50_ms: float
    """Median wall time of a step, drafting excluded."""


class Speculation(Record):
    """Speculative decoding. Profiled steps have no draft tokens and are excluded."""

    kind: Literal["ngram", "draft"]
    draft: str | None
    """Name of the draft package; null for n-gram lookup."""
    steps: int
    """Decode steps without profiling."""
    drafting_steps: int
    """Steps that verified draft tokens."""
    drafted: int
    """Verified draft tokens."""
    accepted: int
    acceptance_rate: float | None
    """`accepted` divided by `drafted`; null without draft tokens."""
    tokens: int
    """New tokens of all rows."""
    tokens_per_step: float | None
    seconds: float
    """Wall time of the steps."""
    draft_seconds: float
    """Time for drafting, part of `seconds`, including runs of the draft model."""
    plain_token_ms: float | None
    """Median time per token of steps without draft tokens, without drafting time; null if there are none."""
    speedup: float | None
    """Estimated time without draft tokens, divided by the measured time. The estimate uses the median of steps without
    draft tokens and with the same number of rows; null without draft tokens, or without these steps.
    """
    widths: tuple[DraftedWidth, ...]


def speculation_figures(fact: SpeculationFact | None, steps: Sequence[StepFact]) -> Speculation | None:
    """The figures of a run; None without speculative decoding."""
    if fact is None:
        return None
    made = [step for step in steps if step.phase == "decode" and not step.observed]
    plain = [_own_seconds(step) / _tokens(step) for step in made if not step.drafted and _tokens(step)]
    tokens, drafted = sum(map(_tokens, made)), sum(step.drafted for step in made)
    accepted = sum(step.accepted for step in made)
    return Speculation(
        kind=fact.kind,
        draft=fact.draft,
        steps=len(made),
        drafting_steps=sum(bool(step.drafted) for step in made),
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        tokens=tokens,
        tokens_per_step=tokens / len(made) if made else None,
        seconds=sum(step.seconds + step.overhead_seconds for step in made),
        draft_seconds=sum(step.draft_seconds for step in made),
        plain_token_ms=1000 * statistics.median(plain) if plain else None,
        speedup=_speedup(made) if drafted else None,
        widths=tuple(_of_width(width, made) for width in sorted({step.width for step in made})),
    )


def rows_of(found: Speculation) -> int:
    """Sum of active rows over all steps: new tokens without accepted draft tokens."""
    return found.tokens - found.accepted


def _speedup(steps: Sequence[StepFact]) -> float | None:
    """Speedup, comparing each step with steps of equally many rows, because rows share the time of a step."""
    by_rows: dict[int, list[float]] = {}
    for step in steps:
        if not step.drafted and _tokens(step):
            by_rows.setdefault(_rows(step), []).append(_own_seconds(step))
    plain = {rows: statistics.median(seconds) for rows, seconds in by_rows.items()}
    compared = [step for step in steps if _rows(step) in plain]
    took = sum(step.seconds + step.overhead_seconds for step in compared)
    without = sum(_tokens(step) / _rows(step) * plain[_rows(step)] for step in compared)
    return without / took if took > 0 else None


def _rows(step: StepFact) -> int:
    return _tokens(step) - step.accepted


def _of_width(width: int, steps: Sequence[StepFact]) -> DraftedWidth:
    own = [step for step in steps if step.width == width]
    median = statistics.median(map(_own_seconds, own))
    return DraftedWidth(width=width, steps=len(own), tokens=sum(map(_tokens, own)), step_p50_ms=1000 * median)


def _own_seconds(step: StepFact) -> float:
    return step.seconds + step.overhead_seconds - step.draft_seconds


def _tokens(step: StepFact) -> int:
    return step.tokens if step.row_tokens is None else step.row_tokens
