"""What is different between two reports, for a terminal: the answer first, then what stands behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.console import Console

from partita.diff.records import CopyChange, Figure, NodeChange, ReasonChange, ReportDiff
from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    listing,
    name_some,
    named_provider,
    plural,
    tally,
)
from partita.partition_reports.render.terminal import BOLD, DIM, Page, terminal_view
from partita.partition_reports.sections.model import Column

NAMES = 12
"""Nodes that a group names; --json names all."""
GROUPS = 20
"""Most groups, and most rows of a table."""
FIGURES = {
    "nodes": "nodes",
    "partitions": "partitions",
    "copies": "copies",
    "copy_bytes_per_run": "bytes copied per run",
    "copy_bytes_per_token": "bytes copied per token",
    "host_wait_us_per_token": "ms waited per token",
    "tokens_per_second": "tokens/s",
    "step_p50_ms": "p50 ms per step",
}


def render(diff: ReportDiff, console: Console) -> None:
    """Print the difference to `console`, at its width; readable at 80 columns and without colour."""
    page = Page(console)
    page.line(diff.headline, indent=0, style=BOLD)
    _show_sides(page, diff)
    _show_changes(page, diff)
    _show_nodes(
        page, "Moved", diff.moved, lambda node: f"{named_provider(node.before)} -> {named_provider(node.after)}"
    )
    _show_nodes(page, "Added", diff.came, lambda node: f"on {named_provider(node.after)}")
    _show_nodes(page, "Removed", diff.gone, lambda node: f"was on {named_provider(node.before)}")
    _show_other_names(page, diff)
    _show_reasons(page, diff.reasons)
    _show_copies(page, diff.copies)
    _show_cost(page, diff)


def _show_sides(page: Page, diff: ReportDiff) -> None:
    """Which two reports these are."""
    page.heading("Reports")
    rows = []
    for letter, side in (("A", diff.before), ("B", diff.after)):
        rows.append((letter, f"{side.name}: {side.what}, ONNX Runtime {side.onnxruntime}, {side.created}"))
    page.pairs(rows)


def _show_changes(page: Page, diff: ReportDiff) -> None:
    """Versions, options and states that are others."""
    if not diff.changes:
        return
    page.heading("Environment and request")
    # Another version is always another build, and what it was built with is a long text.
    another_version = any(change.key == "onnxruntime" for change in diff.changes)
    rows = [
        (change.subject.replace("_", " "), change.name, change.before or NOT_KNOWN, change.after or NOT_KNOWN)
        for change in diff.changes
        if change.key != "onnxruntime_build" or not another_version
    ]
    page.table([Column(title, False) for title in ("in", "what", "A", "B")], rows)


def _show_nodes(page: Page, title: str, changes: Sequence[NodeChange], say_way: Callable[[NodeChange], str]) -> None:
    """Nodes in groups of one way and reason; phases with the same nodes share a group."""
    if not changes:
        return
    page.heading(f"{title}: {plural(len({change.node for change in changes}), 'node')}")
    groups: dict[tuple[str, str], list[NodeChange]] = {}
    for change in changes:
        groups.setdefault((say_way(change), change.reason or ""), []).append(change)
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    for (way, reason), members in ranked[:GROUPS]:
        _show_group(page, f"{way}{f': {reason}' if reason else ''}", members)
    if len(ranked) > GROUPS:
        left = sum(len(members) for _, members in ranked[GROUPS:])
        page.line(f"and {plural(left, 'more node')} in {len(ranked) - GROUPS} more groups; --json has all", style=DIM)


def _show_group(page: Page, head: str, members: Sequence[NodeChange]) -> None:
    """One group: phases, operators, nodes and the evidence."""
    for phases, nodes in _phases_alike(members):
        page.line(f"{head}, {plural(len(nodes), 'node')} in {phases}")
        page.line(f"operators: {tally(Counter(node.op_type or 'unknown' for node in nodes))}", indent=4)
        page.line(f"nodes: {name_some([_say_node(node) for node in nodes], NAMES)}", indent=4)
        inside = Counter(node.runs_in for node in nodes if node.runs_in)
        if inside:
            page.line(f"as part of: {tally(inside)}", indent=4)
    told = (("evidence", [member.evidence for member in members]), ("remedy", [member.remedy for member in members]))
    for label, texts in told:
        different = [text for text in dict.fromkeys(texts) if text]
        if different:
            more = f" (and {len(different) - 1} more like it)" if len(different) > 1 else ""
            page.line(f"{label}: {different[0]}{more}", indent=4)


def _say_node(change: NodeChange) -> str:
    """Its name, and the former one."""
    return f"{change.node} (was {change.name_before})" if change.name_before else change.node


def _phases_alike(changes: Iterable[NodeChange]) -> list[tuple[str, list[NodeChange]]]:
    """Phases that have the same nodes, together."""
    found: dict[tuple[str, ...], tuple[list[str], list[NodeChange]]] = {}
    for phase, members in groupby(changes, key=lambda change: change.phase):
        nodes = list(members)
        found.setdefault(tuple(node.node for node in nodes), ([], nodes))[0].append(phase)
    return [(listing(phases), nodes) for phases, nodes in found.values()]


def _show_other_names(page: Page, diff: ReportDiff) -> None:
    """Nodes that stayed where they were under another name, or in other company."""
    renamed = [change for change in diff.renamed if change.before == change.after]
    if not (renamed or diff.fused_otherwise):
        return
    page.heading("Same provider, renamed or fused differently")
    if renamed:
        names = list(dict.fromkeys(_say_node(change) for change in renamed))
        page.line(f"{plural(len(names), 'node')} matched under a different number: {name_some(names, NAMES)}")
    forms: dict[str, list[str]] = {}
    for change in diff.fused_otherwise:
        forms.setdefault(f"{change.before} -> {change.after}", []).append(change.node)
    for form, found in forms.items():
        nodes = list(dict.fromkeys(found))
        page.line(f"{plural(len(nodes), 'node')} compiled or fused differently, {form}: {name_some(nodes, NAMES)}")


def _show_reasons(page: Page, changes: Sequence[ReasonChange]) -> None:
    """Reasons of nodes that did not move; those of moved nodes stand with them."""
    left = [change for change in changes if not change.moved]
    if not left:
        return
    page.heading("Reasons")
    groups: dict[tuple[str, str], list[ReasonChange]] = {}
    for change in left:
        groups.setdefault((change.change, _say_reason(change)), []).append(change)
    for (_, head), members in list(groups.items())[:GROUPS]:
        phases = listing(dict.fromkeys(member.phase for member in members))
        nodes = list(dict.fromkeys(member.node for member in members))
        page.line(f"{head}: {plural(len(nodes), 'node')} in {phases}: {name_some(nodes, NAMES)}")
        shown = members[-1]
        if shown.change != "gone":
            page.line(f"evidence ({shown.evidence_kind}): {shown.evidence}", indent=4)
            page.line(f"remedy: {shown.remedy}", indent=4)
    if len(groups) > GROUPS:
        page.line(f"and {len(groups) - GROUPS} more; --json has all", style=DIM)


def _say_reason(change: ReasonChange) -> str:
    about = f"why not {named_provider(change.skipped)}: " if change.skipped else ""
    before, after = change.before or "unknown", change.after or "unknown"
    if change.change == "changed":
        return f"{about}{before} -> {after}, on {named_provider(change.provider)}"
    if change.change == "gone":
        return f"{about}no longer {before}"
    return f"{about}new: {after}, on {named_provider(change.provider)}"


def _show_copies(page: Page, changes: Sequence[CopyChange]) -> None:
    """Copies that are new, gone or of another size."""
    if not changes:
        return
    page.heading(f"Copies: {plural(len(changes), 'change')}")
    alike: dict[tuple[str, ...], list[CopyChange]] = {}
    for change in changes:
        alike.setdefault((change.change, change.direction, change.what, *change.caused_by), []).append(change)
    rows = [_copy_row(same) for same in list(alike.values())[:GROUPS]]
    left = len(alike) - GROUPS
    phases = " / ".join(dict.fromkeys(change.phase for change in changes))
    columns = (Column("", False), Column("bytes A"), Column("bytes B"), Column("way, tensor", False))
    page.table(columns, rows, f"and {plural(left, 'more change')}; --json has all" if left > 0 else "")
    page.line(f"Bytes are per run: {phases}; - where unknown.")


def _copy_row(same: Sequence[CopyChange]) -> tuple[str, ...]:
    """One copy in every phase that it changed in."""
    change = same[0]
    was, now = (
        " / ".join(human_bytes(size) for size in sizes)
        for sizes in ([entry.bytes_before for entry in same], [entry.bytes_after for entry in same])
    )
    cells = {"new": ("", now), "gone": (was, ""), "changed": (was, now)}[change.change]
    only = "" if len(same) > 1 else f", in {change.phase}"
    first, *others = change.caused_by or ("",)
    cause = f", for {first}{f' and {len(others)} more' if others else ''}" if first else ""
    border = "" if change.kind == "memcpy_node" else f"{change.kind.replace('_', ' ')}, "
    way = change.direction.replace("_", " ")
    return (change.change, *cells, f"{border}{way}: {change.what}{cause}{only}")


def _show_cost(page: Page, diff: ReportDiff) -> None:
    """Counts, sizes and times of both, with what they are worth."""
    page.heading("Cost")
    rows = [
        (
            figure.phase,
            FIGURES[figure.name],
            _say_figure(figure, figure.before),
            _say_figure(figure, figure.after),
            _say_ratio(figure),
        )
        for figure in diff.figures
        if figure.before != figure.after and not _said_twice(figure, diff.figures)
    ]
    if rows:
        page.table((Column("phase", False), Column("", False), Column("A"), Column("B"), Column("B / A")), rows)
    else:
        page.line("The same.")
    if any(_say_ratio(figure).endswith("~") for figure in diff.figures):
        page.line("~: the slower steps of each run are as slow as the median step of the other.")
    for text in diff.notes:
        page.line(f"- {text}")


def _said_twice(figure: Figure, figures: Sequence[Figure]) -> bool:
    """A run of one token copies per run what it copies per token."""
    if figure.name != "copy_bytes_per_run":
        return False
    values = (figure.before, figure.after)
    return any(
        (other.before, other.after) == values
        for other in figures
        if other.phase == figure.phase and other.name == "copy_bytes_per_token"
    )


def _say_figure(figure: Figure, value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    if figure.name.startswith("copy_bytes"):
        return human_bytes(round(value))
    if figure.name == "host_wait_us_per_token":
        return decimals(value, 1e-3)
    return f"{value:,.0f}" if figure.spread == "counted" else decimals(value)


def _say_ratio(figure: Figure) -> str:
    """The ratio; marked where the spread of the steps within the runs explains it."""
    if figure.ratio is None:
        return NOT_KNOWN
    return f"{decimals(figure.ratio)}{' ~' if figure.spread == 'within' else ''}"


VIEW = terminal_view("text", "what changed in another report", render)
