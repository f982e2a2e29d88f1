"""Memory of the KV cache, and states that did not stay in place."""

from __future__ import annotations

from partita.observations.text_format import human_bytes, name_some, plural
from partita.partition_reports.outcome import status_of
from partita.partition_reports.records import Cache, Report
from partita.partition_reports.sections.model import Block, Column, Fold, Line, Section, table, text_column

NAMED = 12


def section(report: Report) -> Section | None:
    """None without a cache."""
    cache = report.cache
    status = status_of(cache)
    if cache is None or status == "no_cache":
        return None
    where = ", ".join(f"{human_bytes(size)} on {memory}" for memory, size in cache.memories.items())
    blocks: list[Block] = [Line(f"{plural(cache.states, 'state')}, {where}")]
    blocks += (
        [Line("No step was observed, so it is unknown whether it stayed in place.")]
        if status == "not_checked"
        else _render_in_place(cache)
    )
    rows = [
        (entry.name, entry.kind, entry.memory, human_bytes(entry.size_bytes), "yes" if entry.in_place else "NO")
        for entry in cache.entries
    ]
    heads = (text_column("state"), text_column("kind"), text_column("memory"), Column("size"), text_column("in place"))
    blocks.append(Fold("All states", (table("States of the KV cache", heads, rows),)))
    return Section("cache", "KV cache", tuple(blocks))


def _render_in_place(cache: Cache) -> list[Block]:
    """Number of states that stayed in place, and names of the others."""
    steps = (
        "every observed step"
        if cache.checked_steps is None
        else f"each of {plural(cache.checked_steps, 'observed step')}"
    )
    lines: list[Block] = [
        Line(
            f"{cache.in_place_states} of {cache.states} in place (past and present at one address at {steps}), "
            f"{plural(cache.address_changes, 'address change')}"
        )
    ]
    if cache.copied_bytes:
        size = human_bytes(cache.copied_bytes)
        lines.append(Line(f"Every step returns present as a new tensor; the last step copied {size} of past into it."))
    moved = [entry.name for entry in cache.entries if not entry.in_place]
    return [*lines, Line(name_some(moved, NAMED), "NOT in place", "bad")] if moved else lines
