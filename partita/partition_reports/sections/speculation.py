"""Speculative decoding: acceptance rate, step times by width, and the speedup."""

from __future__ import annotations

from partita.observations.text_format import NOT_KNOWN, decimals, percent, plural
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import Block, Column, Line, Section, table
from partita.partition_reports.speculation import Speculation


def section(report: Report) -> Section | None:
    """None without speculative decoding."""
    found = report.speculation
    if found is None:
        return None
    seconds = f"Drafting took {decimals(found.draft_seconds)} of {decimals(found.seconds)} s."
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
        Column("input tokens"),
        Column("steps"),
        Column("tokens"),
        Column("tokens per step"),
        Column("step p50, ms"),
        Column("relative to 1 token"),
    )
    steps = table("Steps by input tokens per row", heads, rows)
    blocks: list[Block] = [Line(_acceptance_text(found)), Line(seconds), steps]
    if found.drafted:
        blocks.insert(0, Line(speedup_text(found)))
    return Section("speculation", "Speculative decoding", tuple(blocks))


def speedup_text(found: Speculation) -> str:
    """The speedup in a sentence."""
    if found.speedup is None:
        return "Speedup unknown: no decode step ran without draft tokens."
    basis = f"{decimals(found.plain_token_ms)} ms per token in steps without draft tokens"
    return f"Decode was {found.speedup:.2f} times as fast as without draft tokens ({basis})."


def _acceptance_text(found: Speculation) -> str:
    source = "n-gram lookup" if found.draft is None else f"the draft package {found.draft}"
    if found.acceptance_rate is None:
        return f"No draft tokens from {source} in {plural(found.steps, 'step')}."
    return (
        f"Draft tokens from {source}: {found.accepted:,} of {found.drafted:,} accepted "
        f"({percent(found.acceptance_rate)}), in {found.drafting_steps:,} of {plural(found.steps, 'step')}; "
        f"{decimals(found.tokens_per_step)} tokens per step."
    )
