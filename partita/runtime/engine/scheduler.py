"""Which rows take part in the next step. A policy is a function of the rows; the planner does what it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partita.runtime.engine.planner import Graphs, RowView

Policy = Callable[[Sequence[RowView], Graphs], list[RowView]]


def prompts_first(rows: Sequence[RowView], graphs: Graphs) -> list[RowView]:
    """While a prompt is read, rows that only go on wait: their step would cost as much as a whole chunk.

    Not where padding would spoil a state, unless the prompt is read in steps of its row: every row that has begun must
    take part then. Nor where a prompt beside rows that have begun is read token by token: such a step costs no more
    with them in it.
    """
    waits = graphs.padding_is_safe or graphs.takes_fewer_rows
    one_by_one = not graphs.appends_chunks and not graphs.takes_fewer_rows and any(r.live and r.filled for r in rows)
    if not waits or one_by_one or not any(row.reads and row.pending for row in rows):
        return list(rows)
    return [row if row.reads else row._replace(most=0) for row in rows]


def rows_at_work_first(rows: Sequence[RowView], graphs: Graphs) -> list[RowView]:
    """The step between chunks of prompts: rows that only go on have it, and prompts wait. Where `prompts_first` has no
    row wait, none does here.
    """
    goes_on = any(not row.reads and row.pending for row in rows)
    if not graphs.padding_is_safe or not goes_on or prompts_first(rows, graphs) == list(rows):
        return prompts_first(rows, graphs)
    return [row._replace(most=0) if row.reads else row for row in rows]


def one_row_first(rows: Sequence[RowView], graphs: Graphs) -> list[RowView]:
    """Like `prompts_first`, and prompts are read one after the other, where a step may be of a row alone."""
    first = next((index for index, row in enumerate(rows) if row.reads and row.pending), None)
    if first is None or not graphs.takes_fewer_rows:
        return prompts_first(rows, graphs)
    return [row if index == first else row._replace(most=0) for index, row in enumerate(rows)]


def one_token_first(rows: Sequence[RowView], graphs: Graphs) -> list[RowView]:
    """Like `prompts_first`, and every row begins with a single token, so that a chunk begins elsewhere than at 0."""
    return [row._replace(most=1) if not row.filled else row for row in prompts_first(rows, graphs)]
