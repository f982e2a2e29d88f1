"""Speculative decoding: one step verifies several draft tokens of a row.

A step that is fed a row's last token and k draft tokens gives the logits after each. The sampler chooses a token from
the first logits, and goes on while it chooses the draft token. The tokens are those of decoding without drafts, drawn
ones included; only the number of steps changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from partita.errors import PartitaError
from partita.runtime.engine.executor import Runner
from partita.runtime.engine.planner import StepPlan
from partita.runtime.engine.request import Row


class Verified(NamedTuple):
    """The draft tokens of one row in one step."""

    drafted: int
    accepted: int


class DraftControl(Protocol):
    """Chooses how many draft tokens a step verifies."""

    def count(self, live: int) -> int:
        """Draft tokens per row for the next step of `live` rows; 0 for none."""

    def record(self, live: int, drafted: int, seconds: float, verified: Sequence[Verified]) -> None:
        """A decode step with `drafted` tokens per row took `seconds`, drafting included."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens of the next step."""

    live: int = 0
    """Rows that decode, when the control counts this step; else 0."""
    plan: StepPlan | None = None
    """The step that verifies the draft tokens; None without any."""
    seconds: float = 0.0
    """Wall time of drafting."""


NO_DRAFTS = Drafts()


def draft(
    rows: Sequence[Row | None], runner: Runner, control: DraftControl | None, plan: Callable[[], StepPlan | None]
) -> Drafts:
    """Have the rows' drafters write draft tokens, and plan the step that verifies them.

    There are none while a prompt is read or runs are profiled, when the cache cannot be rewound, and when no graph
    gives the logits of several tokens of so many rows. `plan` makes the step of the rows as they are. Without `control`
    each row gets as many draft tokens as fit.
    """
    began, filled = time.perf_counter(), runner.cache.filled
    going = [(row, count) for row, count in zip(rows, filled, strict=True) if row is not None and row.finish is None]
    drafting = [(row, room) for row, count in going if (room := row.room_for_drafts(count))]
    if not drafting or not runner.takes_back or runner.graph("decode").window.open:
        return NO_DRAFTS
    live = sum(count >= row.read_until for row, count in going)
    if not runner.capacity.appends(live):
        return NO_DRAFTS
    if live < len(going) and (unchanged := plan()) is not None and unchanged.reads:
        return NO_DRAFTS
    most = None if control is None else control.count(live)
    if most == 0:
        return Drafts(live)
    for row, room in drafting:
        ask(row, room if most is None else min(room, most))
    made = plan() if any(row.drafted for row, _ in drafting) else None
    if made is None or not all(row is None or _is_verified(made, index, row) for index, row in enumerate(rows)):
        for row, _ in drafting:
            row.drafted = 0
        made = None
    return Drafts(live, made, time.perf_counter() - began)


def get_ready(rows: Sequence[Row | None], runner: Runner, plan: StepPlan) -> None:
    """Have drafters read the prompts that a step has read to their end, if the rows can draft after it."""
    if not plan.reads or not runner.capacity.appends(sum(row is not None and row.finish is None for row in rows)):
        return
    for index, _ in plan.ends:
        row = rows[index]
        if row is not None and row.request.drafter is not None and row.finish is None:
            ask(row, 0)


def ask(row: Row, most: int) -> None:
    """Have a row's drafter write at most `most` draft tokens. One that fails is not used any more."""
    try:
        row.draft(most)
    except PartitaError as error:
        row.stop_drafting(str(error))


def _is_verified(plan: StepPlan, index: int, row: Row) -> bool:
    """Whether a plan feeds a row all of its draft tokens, and gives the logits before each."""
    wanted = row.drafted + 1
    return wanted == 1 or (plan.take[index] == wanted and set(range(wanted)) <= set(plan.positions))
