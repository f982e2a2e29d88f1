"""The step that confirms guesses: asks rows for them, lets the governor choose, and plans a step that can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.errors import PartitaError
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.guesses import Governor, Heard, Judged
from partita.runtime.engine.planner import StepPlan
from partita.runtime.engine.request import Row


@dataclass(frozen=True, slots=True)
class Guessing:
    """What came of asking for guesses."""

    plan: StepPlan | None = None
    """The step that confirms them; None for none."""
    asked: int = 0
    """Guesses that were made."""
    read: int = 0
    """Tokens that those who guess had to read before."""
    declined: bool = False
    """They were not worth it."""
    looked: bool = True
    """Time was spent on them, or on weighing whether to."""
    unheard: bool = False
    """Nothing is to be learnt of the step: the governor rests, or several rows go on of which one alone could have
    guesses confirmed.
    """


_NONE = Guessing()
_PLAIN = Guessing(looked=False)
_NOBODY = Guessing(looked=False, unheard=True)
_DECLINED = Guessing(declined=True)
_OTHERS = Guessing(unheard=True)
_RESTS = Guessing(declined=True, looked=False, unheard=True)


def make_guesses(
    rows: Sequence[Row | None], executor: Executor, governor: Governor | None, plan: Callable[[], StepPlan | None]
) -> Guessing:
    """The next step with guesses of what follows; none where nobody guesses, or a guess could not be taken back.

    A guess is confirmed by the logits before it, so all of a row's go into one step that gives those of each; where
    the graphs do not make such a step, there are none: some make one of a row alone, and none while several go on.
    Nor are there while steps are profiled: what is observed is what a token takes. `plan` makes the step of the rows
    as they are.
    """
    if not any(row is not None and row.request.guesser is not None for row in rows):
        return _NOBODY
    if governor is not None and governor.rests():
        return _RESTS
    live, unfinished, room = _room(rows, executor.cache.filled)
    if not live or (live < unfinished and _reads(plan())):
        return _PLAIN
    if not executor.graphs.appends(live):
        return _OTHERS
    if not any(room) or not executor.takes_back or executor.observed:
        return _PLAIN
    if governor is not None and governor.measuring(live):
        return _PLAIN
    behind = _behind(rows, room)
    most = None if governor is None else governor.most(live, behind, max(room))
    if most == 0:
        return _DECLINED
    for row, count in zip(rows, room, strict=True):
        if row is not None and count:
            _ask(row, count if most is None else min(count, most))
    return _chosen(rows, live, governor, plan, behind)


def _room(rows: Sequence[Row | None], filled: Sequence[int]) -> tuple[int, int, list[int]]:
    """Rows that go on, which are not those that still read, for these take no part in a step of the others; rows that
    have not finished; and how many guesses each could have confirmed. Made once per step, in one pass.
    """
    live, unfinished, room = 0, 0, [0] * len(rows)
    for index, row in enumerate(rows):
        if row is not None and row.finish is None:
            unfinished += 1
            live += filled[index] >= row.read_until
            room[index] = row.room_to_guess(filled[index])
    return live, unfinished, room


def _behind(rows: Sequence[Row | None], room: Sequence[int]) -> int:
    """Tokens that those who guess would have to read before."""
    return sum(
        row.reader.behind(row.history[: row.known])
        for row, count in zip(rows, room, strict=True)
        if count and row is not None and row.reader is not None
    )


def get_ready(rows: Sequence[Row | None], executor: Executor, plan: StepPlan) -> None:
    """Let those who guess look at prompts that a step has read to their end, where they will be asked next: those that
    still read go on then, too.
    """
    if not plan.reads or not executor.graphs.appends(_unfinished(rows)):
        return
    for index, _ in plan.ends:
        row = rows[index]
        if row is not None and row.request.guesser is not None and row.finish is None:
            _ask(row, 0)


def _ask(row: Row, most: int) -> None:
    """Have a row's guesser guess, or get ready. One that fails is asked no more: an answer does without."""
    try:
        row.guess(most)
    except PartitaError as error:
        row.keep_guesses(0)
        row.guess_no_more(str(error))


def heard(
    plan: StepPlan,
    guessing: Guessing,
    seconds: float,
    guess_seconds: float,
    tokens: Sequence[Sequence[int]],
    tested: Sequence[Judged | None],
) -> Heard:
    """A decode step for the governor. `tokens`: those that each row got; `tested`: what came of its guesses."""
    return Heard(
        width=plan.new_tokens,
        seconds=seconds,
        guess_seconds=guess_seconds,
        asked=guessing.asked,
        live=sum(map(bool, plan.take)),
        tokens=sum(map(len, tokens)),
        tested=tuple(entry for entry in tested if entry is not None),
        read=guessing.read if guessing.asked else 0,
    )


def _unfinished(rows: Sequence[Row | None]) -> int:
    """Rows that go on, those that still read included."""
    return sum(row is not None and row.finish is None for row in rows)


def _reads(plan: StepPlan | None) -> bool:
    """Whether a step reads part of a prompt, so that those that go on wait."""
    return plan is not None and plan.reads


def _chosen(
    rows: Sequence[Row | None], live: int, governor: Governor | None, plan: Callable[[], StepPlan | None], behind: int
) -> Guessing:
    """The step that confirms as many of the rows' guesses as is worth it. `behind`: tokens that were read for them."""
    guessing = [row for row in rows if row is not None and row.guessed]
    asked = sum(row.guessed for row in guessing)
    count = None if governor is None else governor.choose([row.evidence for row in guessing], live)
    if not guessing:
        return _NONE
    if count is not None:
        for row in guessing:
            row.keep_guesses(count)
        if not count:
            return Guessing(None, asked, behind, declined=True)
    made = plan()
    if made is None or not all(row is None or _confirmed_by(made, index, row) for index, row in enumerate(rows)):
        for row in guessing:
            row.keep_guesses(0)
        return Guessing(None, asked, behind)
    return Guessing(made, asked, behind)


def _confirmed_by(plan: StepPlan, index: int, row: Row) -> bool:
    """Whether a plan feeds a row all of its guesses, and gives the logits before each."""
    wanted = row.guessed + 1
    return wanted == 1 or (plan.take[index] == wanted and set(range(wanted)) <= set(plan.positions))
