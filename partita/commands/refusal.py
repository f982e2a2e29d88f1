"""The table of nodes that the chain does not run, for stderr; grouped if there are many."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.console import Console

from partita.errors import ProviderRefusal, RefusedNode
from partita.observations.text_format import name_some, plural, short_provider
from partita.partition_reports.render.terminal import Page
from partita.partition_reports.sections.model import Column
from partita.partition_reports.sections.shared import REASONS_PAGE

WIDTH = 120
"""Width of stderr if it is unknown."""
MOST_ROWS = 40
SINGLE_NODES = 40
"""Maximum nodes with a row each; more nodes are grouped by operator and reason."""
NAMES = 2
"""Maximum families of nodes that a group names."""
EVIDENCE = 2
"""Maximum quoted log lines per reason, below the table."""
NO_NAME = "(no name)"


def render_refusal(rows: Sequence[RefusedNode], width: int | None = None) -> str:
    """A table of the nodes, then the evidence per reason, as text without colour; empty without nodes.

    `width`: columns; that of the terminal on stderr when it is left out.
    """
    if not rows:
        return ""
    stream, columns = io.StringIO(), width or _stderr_columns()
    page = Page(Console(file=stream, width=columns, color_system=None, force_terminal=False, legacy_windows=False))
    asked = " or ".join(dict.fromkeys(entry.provider for row in rows for entry in row.available_refusals))
    page.line(f"{plural(len(rows), 'node')} would not run on {asked}:", indent=0)
    if len(rows) <= SINGLE_NODES:
        _show_nodes(page, rows)
    else:
        _show_groups(page, rows)
    _show_evidence(page, rows)
    return stream.getvalue()


def _stderr_columns() -> int:
    """The variable COLUMNS, else the width of the terminal, else WIDTH."""
    told = os.environ.get("COLUMNS", "")
    if told.isascii() and told.isdigit() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(2).columns or WIDTH
    except OSError:
        return WIDTH


def _show_nodes(page: Page, rows: Sequence[RefusedNode]) -> None:
    """One row per node."""
    columns = [Column(title, False) for title in ("node", "operator", "module", "would run on", "reason")]
    page.table(
        columns,
        [
            (
                row.node or NO_NAME,
                row.op_type or "unknown",
                row.module or "-",
                short_provider(row.provider),
                _render_reasons(row),
            )
            for row in rows
        ],
    )


def _show_groups(page: Page, rows: Sequence[RefusedNode]) -> None:
    """One row per operator, provider and reason, largest first."""
    groups: dict[tuple[str, str, str], list[RefusedNode]] = {}
    for row in rows:
        groups.setdefault((row.op_type or "unknown", row.provider, _render_reasons(row)), []).append(row)
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    cells = [
        (
            operator,
            str(len(members)),
            short_provider(provider),
            reason,
            name_some((row.node or NO_NAME for row in members), NAMES),
        )
        for (operator, provider, reason), members in ranked
    ]
    left = ranked[MOST_ROWS:]
    rest = f"and {sum(len(members) for _, members in left)} more nodes in {len(left)} more groups" if left else ""
    columns = (Column("operator", False), Column("nodes"), Column("would run on", False), Column("reason", False))
    page.table((*columns, Column("examples", False)), cells[:MOST_ROWS], rest)


def _render_reasons(row: RefusedNode) -> str:
    """The reason of a node; with several available providers, the reason of each."""
    if len(row.available_refusals) == 1:
        return row.available_refusals[0].reason
    return ", ".join(f"{short_provider(entry.provider)}: {entry.reason}" for entry in row.available_refusals)


def _show_evidence(page: Page, rows: Sequence[RefusedNode]) -> None:
    """Evidence and remedy of each reason, per provider if there are several."""
    found: dict[tuple[str, str, bool], list[ProviderRefusal]] = {}
    for entry in (entry for row in rows for entry in row.refusals):
        found.setdefault((entry.provider, entry.reason, entry.available), []).append(entry)
    several = len({provider for provider, _, _ in found}) > 1
    for (provider, reason, available), members in found.items():
        missing = "" if available else " is not available"
        about = f"{short_provider(provider)}{missing}: " if several else ""
        page.line(f"{about}{reason}: {members[0].remedy}")
        texts = list(dict.fromkeys(f"{entry.evidence_kind}: {entry.evidence}" for entry in members))
        for text in texts[:EVIDENCE]:
            page.line(text, indent=4)
        if len(texts) > EVIDENCE:
            page.line(f"and {len(texts) - EVIDENCE} similar lines", indent=4)
        page.line(f"see {REASONS_PAGE}#{reason}", indent=4)
