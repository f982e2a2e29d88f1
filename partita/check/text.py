"""The text view of `report check`: one line per failed requirement, for terminals and CI logs."""

from __future__ import annotations

from rich.console import Console

from partita.check.gate import GateResult, headline
from partita.partition_reports.render.terminal import BOLD, Page, terminal_view


def render(result: GateResult, console: Console) -> None:
    """Print failed requirements, or one line if all hold. Lines are not wrapped, for searching logs."""
    page = Page(console)
    if result.passed:
        checked = "; ".join(f"{outcome.check} ({outcome.detail})" for outcome in result.outcomes)
        page.put(f"{headline(result)}: {checked}", BOLD)
        return
    for outcome in result.outcomes:
        if not outcome.met:
            page.put(f"FAILED {outcome.check}: {outcome.detail}")


VIEW = terminal_view("text", render)
