"""Plans the next step: a pure function of the rows and of what the package's graphs support.

A step feeds S tokens to every row; a row with fewer is padded on the right. Keys and values beyond a row's cursor are
never read and are overwritten by its next tokens, so padding is free within the cache. A recurrent state takes in
padding, so S is then the number of tokens of the shortest row.

If a step may run on a span of rows, only these rows matter. A prompt is then prefilled in steps of its row, or with
neighbours of similar length; other rows are untouched. Decode steps run on the span from the first to the last decoding
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

GraphName = Literal["prefill", "decode"]
FEW_TOKENS = 16
"""A run of up to this many tokens takes about as long as one of a single token, because both are bound by reading the
weights. Measured on a CPU: prefill is 6 (4-bit weights) to 22 (float32) times as fast as decoding per token."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a package's graphs and cache."""

    max_length: int
    """N: cache length in tokens."""
    chunk: int | None = None
    """S of the prefill graph, if fixed in the file."""
    logits_rows: int | None = None
    """K of the prefill graph, if fixed in the file."""
    appends_chunks: bool = True
    """False: steps of several tokens per row require every row to be at its beginning."""
    padding_is_safe: bool = True
    """False: a row that has begun must not be padded."""
    decode_any_length: bool = False
    """Prefill has its own graph; the other graph also supports any number of tokens."""

    prefill_reads_past: bool = True
    """False: the prefill graph has no past, so it only runs a text's first tokens."""

    symbolic_batch: bool = False
    """A step may run on a span of rows; a single row supports chunks after past tokens even if a batch does not."""

    def chunk_of(self, requested: int, longest: int) -> int:
        """Prompt tokens per run for a requested chunk. `longest`: tokens of the longest prompt."""
        return self.chunk or (requested if self.appends_chunks or self.symbolic_batch else longest)

    def appends(self, rows: int) -> bool:
        """Whether a step of this many rows may append several tokens to each."""
        return self.appends_chunks or (self.symbolic_batch and rows == 1)


class RowView(NamedTuple):
    """The planner's view of one row. A tuple for speed: one is made per row and step."""

    cache_length: int
    """Cached tokens, the cache position of the next token."""
    pending: int
    """Tokens that are not cached yet; 0 if the row is free or has finished."""
    in_prompt: bool = False
    """Whether the pending tokens belong to its prompt."""
    every_logit: bool = False
    """Whether logits of all its tokens are needed, not only of the last."""
    needs_cache: bool = True
    """False: its cached tokens are not read any more."""
    token_limit: int | None = None
    """Maximum pending tokens to feed in this step; 0 for a waiting row. None: all."""


class StepPlan(NamedTuple):
    """One run of one graph. B rows, S tokens per row, K positions whose logits are computed."""

    graph: GraphName
    new_tokens: int
    """S."""
    counts: tuple[int, ...]
    """[B]: number of the row's own tokens among the S; the rest is padding."""
    starts: tuple[int, ...]
    """[B]: cache position of the row's first token."""
    positions: tuple[int, ...]
    """Positions of 0 .. S-1 whose logits are needed, ascending."""
    ends: tuple[tuple[int, int], ...]
    """(row, position) of rows whose last token is fed; their next token is sampled from its logits."""
    new_rows: tuple[int, ...] = ()
    """Rows whose first token is fed; their recurrent states are zeroed before."""
    is_prefill: bool = False
    """Part of a prompt is run, so the step counts as prefill."""
    span: tuple[int, int] | None = None
    """First and end (exclusive) of the rows of the run; others have no tokens. None: all rows."""


Policy = Callable[[Sequence[RowView], Capacity], list[RowView]]
"""Chooses the rows of the next step, and the maximum tokens of each."""


def prompts_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """Prefill first: decoding rows wait, because a chunk with them would take much longer.

    Except when padding is not allowed and the prompt is not prefilled in steps of its own, since then every row must
    take part; and when a prompt is prefilled token by token, since decoding rows add no cost.
    """
    waits = capacity.padding_is_safe or capacity.symbolic_batch
    one_by_one = (
        not capacity.appends_chunks
        and not capacity.symbolic_batch
        and any(r.needs_cache and r.cache_length for r in rows)
    )
    if not waits or one_by_one or not any(row.in_prompt and row.pending for row in rows):
        return list(rows)
    return [row if row.in_prompt else row._replace(token_limit=0) for row in rows]


def rows_at_work_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """The step between prompt chunks: decoding rows run, prompts wait. No row waits where none does in
    `prompts_first`."""
    goes_on = any(not row.in_prompt and row.pending for row in rows)
    if not capacity.padding_is_safe or not goes_on or prompts_first(rows, capacity) == list(rows):
        return prompts_first(rows, capacity)
    return [row._replace(token_limit=0) if row.in_prompt else row for row in rows]


def one_row_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """Like `prompts_first`, but prompts are prefilled one after the other if a step may run on a single row."""
    first = next((index for index, row in enumerate(rows) if row.in_prompt and row.pending), None)
    if first is None or not capacity.symbolic_batch:
        return prompts_first(rows, capacity)
    return [row if index == first else row._replace(token_limit=0) for index, row in enumerate(rows)]


def one_token_first(rows: Sequence[RowView], capacity: Capacity) -> list[RowView]:
    """Like `prompts_first`, but every row begins with a single token, so that no chunk begins at position 0."""
    return [row._replace(token_limit=1) if not row.cache_length else row for row in prompts_first(rows, capacity)]


def plan_step(rows: Sequence[RowView], capacity: Capacity, most_tokens: int) -> StepPlan | None:
    """The next step; None when no row has pending tokens. `most_tokens`: maximum S, if not fixed."""
    ready = [row.pending if row.token_limit is None else min(row.pending, row.token_limit) for row in rows]
    if not any(ready):
        return None
    if not capacity.symbolic_batch:
        return _plan(rows, ready, capacity, most_tokens)
    first, end = _span(rows, ready, capacity, most_tokens)
    plan = _plan(rows[first:end], ready[first:end], capacity, most_tokens)
    return plan if end - first == len(rows) else _as_batch_plan(plan, first, end, len(rows))


def _plan(rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int) -> StepPlan:
    """A step of all these rows, at least one with a pending token. `ready`: maximum tokens of each."""
    graph, size, counts, reads = _graph_and_tokens(rows, ready, capacity, most_tokens)
    ends = tuple((row, counts[row] - 1) for row, view in enumerate(rows) if 0 < view.pending == counts[row])
    # If every row has to be at its beginning, an idle row is moved there and reads its text again.
    beginning = size > 1 and not capacity.appends(len(rows))
    return StepPlan(
        graph=graph,
        new_tokens=size,
        counts=counts,
        # Overwriting the last token of a full row is safe: it gets no more tokens, and after a rewind its last token
        # is fed again (`GenerationLoop.rewind`).
        starts=tuple(
            0 if beginning and not row.needs_cache else min(row.cache_length, capacity.max_length - size)
            for row in rows
        ),
        positions=_logit_positions(rows, counts, ends, capacity.logits_rows if graph == "prefill" else None),
        ends=ends,
        new_rows=tuple(index for index, row in enumerate(rows) if counts[index] and not row.cache_length),
        is_prefill=reads,
    )


def _graph_and_tokens(
    rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int
) -> tuple[GraphName, int, tuple[int, ...], bool]:
    """The graph of a step of all these rows, S, the tokens of each, and whether part of a prompt is run."""
    turn = ready
    if not capacity.padding_is_safe:
        least = min(filter(None, ready))
        turn = [min(count, least) for count in ready]
    reads = any(row.in_prompt and count for row, count in zip(rows, turn, strict=True))
    graph, size = _choose_graph(rows, turn, capacity, most_tokens, reads=reads)
    return graph, size, tuple(min(count, size) for count in turn), reads


def _span(rows: Sequence[RowView], ready: Sequence[int], capacity: Capacity, most_tokens: int) -> tuple[int, int]:
    """The rows of the next step: first and end (exclusive).

    Prefill: the first row with prompt tokens, and neighbours as long as a common run is no slower than single runs and
    gives no row fewer tokens. Decoding: from the first to the last row with pending tokens.
    """
    reading = [index for index, row in enumerate(rows) if row.in_prompt and ready[index]]
    if not reading:
        working = [index for index, count in enumerate(ready) if count]
        return working[0], working[-1] + 1
    first = reading[0]
    _, size, taken, _ = _graph_and_tokens(rows[first : first + 1], ready[first : first + 1], capacity, most_tokens)
    cost = max(size, FEW_TOKENS)
    for index in range(first + 1, len(rows)):
        if not (rows[index].in_prompt and ready[index]):
            return first, index
        end = index + 1
        _, size, alone, _ = _graph_and_tokens(rows[index:end], ready[index:end], capacity, most_tokens)
        apart = cost + max(size, FEW_TOKENS)
        _, size, together, _ = _graph_and_tokens(rows[first:end], ready[first:end], capacity, most_tokens)
        cost = max(size * (end - first), FEW_TOKENS)
        if together != (*taken, *alone) or cost > apart:
            return first, index
        taken = together
    return first, len(rows)


def _as_batch_plan(plan: StepPlan, first: int, end: int, batch: int) -> StepPlan:
    """The plan of a span as a plan of the batch: other rows have no tokens."""
    before, after = (0,) * first, (0,) * (batch - end)
    return plan._replace(
        counts=(*before, *plan.counts, *after),
        starts=(*before, *plan.starts, *after),
        ends=tuple((first + row, position) for row, position in plan.ends),
        new_rows=tuple(first + row for row in plan.new_rows),
        span=(first, end),
    )


def _choose_graph(
    rows: Sequence[RowView], turn: Sequence[int], capacity: Capacity, most_tokens: int, *, reads: bool
) -> tuple[GraphName, int]:
    """The graph, and S. `turn` [B]: maximum tokens of each row."""
    longest, furthest = max(turn), max(row.cache_length for row in rows if row.needs_cache)
    if longest == 1 and not reads:
        return "decode", 1
    appends = capacity.appends(len(rows))
    may_append = appends or furthest == 0
    room = capacity.max_length - furthest  # padding must not overwrite cached tokens of another row
    fixed = capacity.chunk
    if fixed is None:
        later = not capacity.prefill_reads_past and furthest > 0
        name: GraphName = "decode" if later or (capacity.decode_any_length and not reads) else "prefill"
        return name, max(1, min(longest, room, most_tokens if appends else longest if may_append else 1))
    ends = {count for count in turn if 0 < count <= fixed}
    served = len(ends) <= (capacity.logits_rows or fixed)
    unpadded = capacity.padding_is_safe or min(filter(None, turn)) >= fixed
    usable = (may_append or fixed == 1) and fixed <= room and served and unpadded
    return ("prefill", fixed) if usable else ("decode", 1)


def _logit_positions(
    rows: Sequence[RowView], counts: Sequence[int], ends: Sequence[tuple[int, int]], most: int | None
) -> tuple[int, ...]:
    """Positions whose logits are needed, at least one; the last of them if the graph gives fewer."""
    wanted = {position for _, position in ends}
    for row, count in zip(rows, counts, strict=True):
        if row.every_logit:
            wanted.update(range(count))
    found = sorted(wanted) or [0]
    if most is not None and len(found) > most:
        last = {position for _, position in ends}
        others = [position for position in found if position not in last]
        found = sorted([*last, *others[len(others) - (most - len(last)) :]])
    return tuple(found)
