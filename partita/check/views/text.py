"""The outcome of `report check`, for a terminal or a CI log: one line per thing that does not hold."""

from __future__ import annotations

from rich.console import Console

from partita.check.gate import GateResult
from partita.observations.text_format import plural
from partita.partition_reports.render.terminal import BOLD, Page


def render(result: GateResult, console: Console) -> None:
    """Print what does not hold; one line that says what was checked when all does.

    Lines are not wrapped: a log is searched line by line.
    """
    page = Page(console)
    if result.passed:
        checked = "; ".join(f"{outcome.check} ({outcome.detail})" for outcome in result.outcomes)
        line = f"{result.report}: {plural(len(result.outcomes), 'check')} passed: {checked}"
        console.print(page.text(line, BOLD), soft_wrap=True)
        return
    for outcome in result.outcomes:
        if not outcome.holds:
            console.print(page.text(f"FAILED {outcome.check}: {outcome.detail}"), soft_wrap=True)


def summary(result: GateResult) -> str:
    """One line on what does not hold."""
    failed = [outcome.check for outcome in result.outcomes if not outcome.holds]
    count = f"{len(failed)} of {plural(len(result.outcomes), 'check')}"
    return f"{result.report}: {count} failed: {', '.join(failed)}"
