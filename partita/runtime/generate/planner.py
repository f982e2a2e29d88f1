"""Which graph takes which tokens next: a pure function of the rows and of what the package's graphs can take.

A step feeds S tokens to every row of the batch; a row that has fewer is padded on the right. Two facts decide how much
of that is allowed. Keys and values beyond a row's cursor are never read and are overwritten by its next tokens, so
padding is free as long as it stays inside the cache. A recurrent state takes in whatever its row is fed, so S is then
what the row with fewest tokens has.

Where a step may be of some rows alone, all of that is looked at for those rows only. A prompt is then read in steps of
its row, or of neighbours that are read as fast together, and the others neither take part nor are touched; after the
prompts, a step is of the rows from the first that goes on to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

GraphName = Literal["prefill", "decode"]
FEW_TOKENS = 16
"""A run of so many tokens takes about as long as one of a single token, for reading the weights bounds both. Measured
on a CPU: prompts are read 6 (4-bit weights) to 22 (32-bit weights) times as fast as tokens are generated.
"""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a package's graphs and cache can take."""

    max_length: int
    """N: tokens that a row of the cache holds."""
    chunk: int | None = None
    """S of the graph that reads prompts, when it is fixed in the file."""
    logits_rows: int | None = None
    """K of that graph, when it is fixed in the file."""
    appends_chunks: bool = True
    """False: only a step in which every row is at its beginning takes more than one token per row."""
    padding_is_safe: bool = True
    """False: a row that has begun must be fed tokens of its own only."""
    decode_takes_several: bool = False
    """The graph for prompts is another than that for what comes after them, which takes any number of tokens, too."""

    prefill_reads_past: bool = True
    """False: the graph that reads prompts knows no past, and takes only what rows begin with."""

    takes_fewer_rows: bool = False
    """A step may be of neighbouring rows alone; one row alone takes chunks after past tokens, whatever a batch does."""

    def chunk_of(self, asked: int, longest: int) -> int:
        """Prompt tokens per run, which is not always what was asked for. `longest`: tokens of the longest prompt."""
        return self.chunk or (asked if self.appends_chunks or self.takes_fewer_rows else longest)

    def appends(self, rows: int) -> bool:
        """Whether a step of so many rows may take several tokens of each after past ones."""
        return self.appends_chunks or (self.takes_fewer_rows and rows == 1)


class RowView(NamedTuple):
    """One row of the batch as the planner sees it. A tuple, because one is made per row and step."""

    filled: int
    """Tokens in the cache, which is where the next one goes."""
    pending: int
    """Known tokens that are not in the cache; 0 for a row that is free or has finished."""
    reads: bool = False
    """The pending tokens are part of its prompt."""
    every_logit: bool = False
    """The logits of all its tokens are wanted, and not only those of the last one that is known."""
    live: bool = True
    """False: what it has in the cache is not read any more."""
    most: int | None = None
    """So many of the pending tokens may be fed in this step; 0 for a row that waits. None: all of them."""

    @property
    def ready(self) -> int:
        """Tokens that may be fed in this step."""
        return self.pending if self.most is None else min(self.pending, self.most)


class StepPlan(NamedTuple):
    """One run of one graph. B rows, S tokens per row, K positions whose logits are computed."""

    graph: GraphName
    new_tokens: int
    """S."""
    take: tuple[int, ...]
    """[B]: how many of the S tokens are the row's own; the rest is padding."""
    starts: tuple[int, ...]
    """[B]: the cache position of the row's first token."""
    positions: tuple[int, ...]
    """Positions of 0 .. S-1 whose logits are wanted, ascending."""
    ends: tuple[tuple[int, int], ...]
    """(row, position) of the rows that are fed their last known token: their next token follows from its logits."""
    begins: tuple[int, ...] = ()
    """Rows that are fed their first token: recurrent states are zeroed before."""
    reads: bool = False
    """Part of a prompt is read, so the step counts as prefill."""
    span: tuple[int, int] | None = None
    """The run is of the rows from the first to before the second of these, and others have no tokens; None: of all."""


Policy = Callable[[Sequence[RowView], Capacity], list[RowView]]
"""Chooses the rows of the next step, and tokens of each at most."""


def prompts_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """While a prompt is read, rows that only go on wait: their step would cost as much as a whole chunk.

    Not where padding would spoil a state, unless the prompt is read in steps of its row: every row that has begun must
    take part then. Nor where a prompt beside rows that have begun is read token by token: such a step costs no more
    with them in it.
    """
    waits = capacity.padding_is_safe or capacity.takes_fewer_rows
    one_by_one = (
        not capacity.appends_chunks and not capacity.takes_fewer_rows and any(r.live and r.filled for r in rows)
    )
    if not waits or one_by_one or not any(row.reads and row.pending for row in rows):
        return list(rows)
    return [row if row.reads else row._replace(most=0) for row in rows]


def rows_at_work_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """The step between chunks of prompts: rows that only go on have it, and prompts wait. Where `prompts_first` has no
    row wait, none does here.
    """
    goes_on = any(not row.reads and row.pending for row in rows)
    if not capacity.padding_is_safe or not goes_on or prompts_first(rows, capacity) == list(rows):
        return prompts_first(rows, capacity)
    return [row._replace(most=0) if row.reads else row for row in rows]


def one_row_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """Like `prompts_first`, and prompts are read one after the other, where a step may be of a row alone."""
    first = next((index for index, row in enumerate(rows) if row.reads and row.pending), None)
    if first is None or not capacity.takes_fewer_rows:
        return prompts_first(rows, capacity)
    return [row if index == first else row._replace(most=0) for index, row in enumerate(rows)]


def one_token_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """Like `prompts_first`, and every row begins with a single token, so that a chunk begins elsewhere than at 0."""
    return [row._replace(most=1) if not row.filled else row for row in prompts_first(rows, capacity)]


def plan_step(rows: Sequence[RowView], capacity: Capacity, most_tokens: int) -> StepPlan | None:
    """The next step; None when no row has a pending token. `most_tokens`: largest S, where it is not fixed."""
    ready = [row.ready for row in rows]
    if not any(ready):
        return None
    if not capacity.takes_fewer_rows:
        return _plan(rows, ready, capacity, most_tokens)
    first, end = _span(rows, ready, capacity, most_tokens)
    plan = _plan(rows[first:end], ready[first:end], capacity, most_tokens)
    return plan if end - first == len(rows) else _within(plan, first, end, len(rows))


def _plan(rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int) -> StepPlan:
    """A step of all these rows, of which one has a pending token at least. `ready`: tokens that each may be fed."""
    if max(ready) == 1 and not any(row.reads and count for row, count in zip(rows, ready, strict=True)):
        return _decode_step(rows, ready, capacity)
    graph, size, take, reads = _taken(rows, ready, capacity, most_tokens)
    ends = tuple((row, take[row] - 1) for row, view in enumerate(rows) if 0 < view.pending == take[row])
    # Where every row has to be at its beginning, one that rests is put there, too, and reads what it had anew.
    beginning = size > 1 and not capacity.appends(len(rows))
    return StepPlan(
        graph=graph,
        new_tokens=size,
        take=take,
        # What is written over the last token of a full row is never read: it is fed nothing more, and a row that goes
        # back is fed its last known token once more (`Engine.rewind`).
        starts=tuple(0 if beginning and not row.live else min(row.filled, capacity.max_length - size) for row in rows),
        positions=_wanted_positions(rows, take, ends, capacity.logits_rows if graph == "prefill" else None),
        ends=ends,
        begins=tuple(index for index, row in enumerate(rows) if take[index] and not row.filled),
        reads=reads,
    )


def _taken(
    rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int
) -> tuple[GraphName, int, tuple[int, ...], bool]:
    """The graph of a step of all these rows, S, the tokens of each, and whether part of a prompt is read."""
    turn = ready
    if not capacity.padding_is_safe:
        least = min(filter(None, ready))
        turn = [min(count, least) for count in ready]
    reads = any(row.reads and count for row, count in zip(rows, turn, strict=True))
    graph, size = _choose_graph(rows, turn, capacity, most_tokens, reads=reads)
    return graph, size, tuple(min(count, size) for count in turn), reads


def _span(rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int) -> tuple[int, int]:
    """The rows of the next step, from the first to before the second, where it need not be of all.

    The first one with a part of a prompt to read, and neighbours for as long as a run of all is no slower than theirs
    one by one, and gives none of them less. Without a prompt: all that have something to do, and what is between them.
    """
    reading = [index for index, row in enumerate(rows) if row.reads and ready[index]]
    if not reading:
        working = [index for index, count in enumerate(ready) if count]
        return working[0], working[-1] + 1
    first = reading[0]
    _, size, taken, _ = _taken(rows[first : first + 1], ready[first : first + 1], capacity, most_tokens)
    cost = max(size, FEW_TOKENS)
    for index in range(first + 1, len(rows)):
        if not (rows[index].reads and ready[index]):
            return first, index
        end = index + 1
        _, size, alone, _ = _taken(rows[index:end], ready[index:end], capacity, most_tokens)
        apart = cost + max(size, FEW_TOKENS)
        _, size, together, _ = _taken(rows[first:end], ready[first:end], capacity, most_tokens)
        cost = max(size * (end - first), FEW_TOKENS)
        if together != (*taken, *alone) or cost > apart:
            return first, index
        taken = together
    return first, len(rows)


def _within(plan: StepPlan, first: int, end: int, batch: int) -> StepPlan:
    """The plan of some rows as one of the batch: the others have no tokens."""
    before, after = (0,) * first, (0,) * (batch - end)
    return plan._replace(
        take=(*before, *plan.take, *after),
        starts=(*before, *plan.starts, *after),
        ends=tuple((first + row, position) for row, position in plan.ends),
        begins=tuple(first + row for row in plan.begins),
        span=(first, end),
    )


def _decode_step(rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity) -> StepPlan:
    """One token of each row that has one: what nearly every step of a generation is."""
    last = capacity.max_length - 1
    return StepPlan(
        graph="decode",
        new_tokens=1,
        take=tuple(ready),
        starts=tuple([min(row.filled, last) for row in rows]),
        positions=(0,),
        ends=tuple([(index, 0) for index, row in enumerate(rows) if row.pending == 1 == ready[index]]),
        begins=tuple([index for index, row in enumerate(rows) if ready[index] and not row.filled]),
    )


def _choose_graph(
    rows: Sequence[RowView], turn: Sequence[int], capacity: Capacity, most_tokens: int, *, reads: bool
) -> tuple[GraphName, int]:
    """The graph, and S. `turn` [B]: tokens that each row may be fed."""
    longest, furthest = max(turn), max(row.filled for row in rows if row.live)
    appends = capacity.appends(len(rows))
    may_append = appends or furthest == 0
    room = capacity.max_length - furthest  # padding must not be written over what another row has in the cache
    fixed = capacity.chunk
    if fixed is None:
        later = not capacity.prefill_reads_past and furthest > 0
        name: GraphName = "decode" if later or (capacity.decode_takes_several and not reads) else "prefill"
        return name, max(1, min(longest, room, most_tokens if appends else longest if may_append else 1))
    ends = {count for count in turn if 0 < count <= fixed}
    served = len(ends) <= (capacity.logits_rows or fixed)
    unpadded = capacity.padding_is_safe or min(filter(None, turn)) >= fixed
    usable = (may_append or fixed == 1) and fixed <= room and served and unpadded
    return ("prefill", fixed) if usable else ("decode", 1)


def _wanted_positions(
    rows: Sequence[RowView], take: Sequence[int], ends: Sequence[tuple[int, int]], most: int | None
) -> tuple[int, ...]:
    """Positions whose logits somebody wants: the last ones, where the graph gives fewer. At least one."""
    wanted = {position for _, position in ends}
    for row, count in zip(rows, take, strict=True):
        if row.every_logit:
            wanted.update(range(count))
    found = sorted(wanted) or [0]
    if most is not None and len(found) > most:
        last = {position for _, position in ends}
        others = [position for position in found if position not in last]
        found = sorted([*last, *others[len(others) - (most - len(last)) :]])
    return tuple(found)
