"""The outcome of `report check`, for a terminal or a CI log: one line per thing that does not hold."""

from __future__ import annotations

from rich.console import Console

from partita.check.document import headline
from partita.check.gate import GateResult
from partita.partition_reports.render.terminal import BOLD, Page, terminal_view


def render(result: GateResult, console: Console) -> None:
    """Print what does not hold; one line that says what was checked when all does.

    Lines are not wrapped: a log is searched line by line.
    """
    page = Page(console)
    if result.passed:
        checked = "; ".join(f"{outcome.check} ({outcome.detail})" for outcome in result.outcomes)
        console.print(page.text(f"{headline(result)}: {checked}", BOLD), soft_wrap=True)
        return
    for outcome in result.outcomes:
        if not outcome.holds:
            console.print(page.text(f"FAILED {outcome.check}: {outcome.detail}"), soft_wrap=True)


VIEW = terminal_view("text", "the outcome of a check, a line for each thing that does not hold", render)
