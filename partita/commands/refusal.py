"""The nodes that would not go to the chain, for a refusal: a table for stderr, grouped when there are many."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.console import Console

from partita.errors import RefusedNode
from partita.observations.text_format import plural, short_provider
from partita.partition_reports.render.terminal import Page
from partita.partition_reports.sections.model import Column

WIDTH = 120
"""Where nobody says how wide stderr is."""
MOST_ROWS = 40
SINGLE_NODES = 40
"""Up to here every node has a row; above, nodes of one operator and reason share one."""
NAMES = 2
"""Nodes that a shared row names."""
EVIDENCE = 2
"""Different log lines that are quoted below the table, per reason."""
NO_NAME = "(no name)"


def render_refusal(rows: Sequence[RefusedNode], width: int | None = None) -> str:
    """The nodes as a table, then the evidence per reason. Lines of text without colour; empty when there are none.

    `width`: columns; that of the terminal on stderr when it is left out.
    """
    if not rows:
        return ""
    stream, columns = io.StringIO(), width or stderr_columns()
    page = Page(Console(file=stream, width=columns, color_system=None, force_terminal=False, legacy_windows=False))
    page.line(f"{plural(len(rows), 'node')} would not run on {rows[0].wanted}:", indent=0)
    if len(rows) <= SINGLE_NODES:
        show_nodes(page, rows)
    else:
        show_groups(page, rows)
    show_evidence(page, rows)
    return stream.getvalue()


def stderr_columns() -> int:
    """What the environment says, as shells do, else the terminal; WIDTH where there is none."""
    told = os.environ.get("COLUMNS", "")
    if told.isascii() and told.isdigit() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(2).columns or WIDTH
    except OSError:
        return WIDTH


def show_nodes(page: Page, rows: Sequence[RefusedNode]) -> None:
    """One row per node."""
    columns = [Column(title, False) for title in ("node", "operator", "module", "would take it", "reason")]
    page.table(
        columns,
        [
            (row.node or NO_NAME, row.op_type or "unknown", row.module or "-", short_provider(row.provider), row.reason)
            for row in rows
        ],
    )


def show_groups(page: Page, rows: Sequence[RefusedNode]) -> None:
    """One row per operator, provider and reason, largest first."""
    groups: dict[tuple[str, str, str], list[RefusedNode]] = {}
    for row in rows:
        groups.setdefault((row.op_type or "unknown", row.provider, row.reason), []).append(row)
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    cells = [
        (operator, str(len(members)), short_provider(provider), reason, name_some(members))
        for (operator, provider, reason), members in ranked
    ]
    left = ranked[MOST_ROWS:]
    rest = f"and {sum(len(members) for _, members in left)} more nodes of {len(left)} more kinds" if left else ""
    columns = (Column("operator", False), Column("nodes"), Column("would take it", False), Column("reason", False))
    page.table((*columns, Column("for example", False)), cells[:MOST_ROWS], rest)


def name_some(rows: Sequence[RefusedNode]) -> str:
    """The first few names."""
    named = ", ".join(row.node or NO_NAME for row in rows[:NAMES])
    return f"{named}, …" if len(rows) > NAMES else named


def show_evidence(page: Page, rows: Sequence[RefusedNode]) -> None:
    """What shows each reason, and what to do about it."""
    by_reason: dict[str, list[RefusedNode]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row)
    for reason, members in by_reason.items():
        page.line(f"{reason}: {members[0].remedy}")
        texts = list(dict.fromkeys(f"{row.evidence_kind}: {row.evidence}" for row in members))
        for text in texts[:EVIDENCE]:
            page.line(text, indent=4)
        if len(texts) > EVIDENCE:
            page.line(f"and {len(texts) - EVIDENCE} more like it", indent=4)
