"""What guesses of what follows have come to: how many were right, what steps cost by their width, and the gain."""

from __future__ import annotations

from partita.observations.text_format import NOT_KNOWN, decimals, percent, plural
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table
from partita.partition_reports.speculation import Speculation

MAKES_NO_DIFFERENCE = 0.005


def section(report: Report) -> Section | None:
    """None where nobody guessed."""
    found = report.speculation
    if found is None:
        return None
    blocks: list[Block] = [Line(told_gain(found)), Line(_told_guesses(found))]
    if found.declined_steps:
        blocks.append(
            Line(
                f"In {plural(found.declined_steps, 'step')} guesses were not worth it, by what steps cost and how "
                "often they were right; none was fed."
            )
        )
    blocks.append(
        Line(f"Making and choosing guesses took {decimals(found.guess_seconds)} of {decimals(found.seconds)} s.")
    )
    one = next((entry.step_p50_ms for entry in found.widths if entry.width == 1), None)
    rows = [
        (
            str(entry.width),
            f"{entry.steps:,}",
            f"{entry.tokens:,}",
            decimals(entry.tokens / entry.steps),
            decimals(entry.step_p50_ms),
            NOT_KNOWN if not one else decimals(entry.step_p50_ms / one),
        )
        for entry in found.widths
    ]
    heads = (
        Column("tokens fed"),
        Column("steps"),
        Column("tokens"),
        Column("tokens per step"),
        Column("step p50, ms"),
        Column("by a step of 1"),
    )
    blocks.append(table("Steps by the tokens that a row is fed", heads, rows))
    return Section("speculation", "Speculation", tuple(blocks))


def told_gain(found: Speculation) -> str:
    """The answer in a sentence."""
    if found.gain is None:
        return "No step was made without guesses, or none at all, so there is nothing to compare with."
    change = found.gain - 1
    how = "as fast as" if abs(change) < MAKES_NO_DIFFERENCE else f"{found.gain:.2f} times as fast as"
    return (
        f"Decode was {how} without guesses, by the {decimals(found.plain_token_ms)} ms that a token took in steps "
        "without any."
    )


def _told_guesses(found: Speculation) -> str:
    """Who guessed, how much and how well."""
    who = "what was written so far" if found.draft is None else f"the draft {found.draft}"
    if found.acceptance is None:
        return f"Guesses from {who}: none was fed in {plural(found.steps, 'step')}."
    return (
        f"Guesses from {who}: {found.confirmed:,} of {found.guessed:,} were right ({percent(found.acceptance)}), in "
        f"{found.guessing_steps:,} of {plural(found.steps, 'step')}; {decimals(found.tokens_per_step)} tokens per step."
    )
