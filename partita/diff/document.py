"""Document of the differences between two reports, for every view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from partita.diff.counting import count_nodes
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
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Document,
    Group,
    Line,
    Pairs,
    Section,
    table,
    text_column,
)

NAMES = 12
"""Maximum nodes named in a group; --json names all."""
GROUPS = 20
"""Maximum groups of a section and rows of its table."""
FIGURES = {
    "nodes": "nodes",
    "added": "nodes added by ONNX Runtime",
    "partitions": "partitions",
    "copies": "copies",
    "copy_bytes_per_run": "bytes copied per run",
    "copy_bytes_per_token": "bytes copied per token",
    "host_wait_us_per_token": "ms waited per token",
    "tokens_per_second": "tokens/s",
    "step_p50_ms": "p50 ms per step",
}


def document(diff: ReportDiff) -> Document:
    """Every section that is not empty."""
    found = (
        _reports(diff),
        _changes(diff),
        _nodes("moved", "Moved", diff.moved, _render_move),
        _nodes("added", "Added", diff.came, lambda node: f"on {named_provider(node.after)}"),
        _nodes("removed", "Removed", diff.gone, lambda node: f"was on {named_provider(node.before)}"),
        _other_names(diff),
        _reasons(diff.reasons),
        _copies(diff.copies),
        _cost(diff),
    )
    return Document(
        kind="Difference of two reports",
        name=f"{diff.before.name} and {diff.after.name}",
        headline=(diff.headline,),
        sections=tuple(section for section in found if section is not None),
    )


VIEWS = Views(document, folded=("reports", "around", "renamed"))


def _reports(diff: ReportDiff) -> Section:
    """The two reports."""
    rows = tuple(
        (letter, (f"{side.name}: {side.what}, ONNX Runtime {side.onnxruntime}, {side.created}",))
        for letter, side in (("A", diff.before), ("B", diff.after))
    )
    return Section("reports", "Reports", (Pairs("Reports", rows),))


def _changes(diff: ReportDiff) -> Section | None:
    """Changed versions, options and states."""
    if not diff.changes:
        return None
    # A changed version implies a changed build, whose text is long.
    another_version = any(change.key == "onnxruntime" for change in diff.changes)
    rows = [
        (change.subject.replace("_", " "), change.name, change.before or NOT_KNOWN, change.after or NOT_KNOWN)
        for change in diff.changes
        if change.key != "onnxruntime_build" or not another_version
    ]
    heads = [text_column(title) for title in ("subject", "property", "A", "B")]
    return Section("around", "Environment and request", (table("Other differences", heads, rows, obvious=True),))


def _render_move(node: NodeChange) -> str:
    return f"{named_provider(node.before)} -> {named_provider(node.after)}"


def _nodes(key: str, title: str, changes: Sequence[NodeChange], say_way: Callable[[NodeChange], str]) -> Section | None:
    """Nodes grouped by change and reason; phases with the same nodes share a group."""
    if not changes:
        return None
    groups: dict[tuple[str, str], list[NodeChange]] = {}
    for change in changes:
        groups.setdefault((say_way(change), change.reason or ""), []).append(change)
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    blocks: list[Block] = []
    for (way, reason), members in ranked[:GROUPS]:
        blocks += _groups(f"{way}{f': {reason}' if reason else ''}", members)
    if len(ranked) > GROUPS:
        left = sum(len(members) for _, members in ranked[GROUPS:])
        more = f"and {plural(left, 'more node')} in {len(ranked) - GROUPS} more groups; the JSON has all"
        blocks.append(Line(more, tone="quiet"))
    return Section(key, title, tuple(blocks), plural(count_nodes(changes), "node"))


def _groups(head: str, members: Sequence[NodeChange]) -> Iterator[Group]:
    """Nodes with one change and reason: phases, operators, names and evidence."""
    shared = [*_first_line("evidence", [member.evidence for member in members])]
    shared += _first_line("remedy", [member.remedy for member in members])
    alike = _phases_alike(members)
    for number, (phases, nodes) in enumerate(alike, 1):
        blocks: list[Block] = [
            Line(tally(Counter(node.op_type or "unknown" for node in nodes)), "operators"),
            Line(name_some([_render_node(node) for node in nodes], NAMES), "nodes"),
        ]
        inside = Counter(node.runs_in for node in nodes if node.runs_in)
        blocks += [Line(tally(inside), "as part of")] if inside else []
        blocks += shared if number == len(alike) else []
        yield Group(f"{head}, {plural(len(nodes), 'node')} in {phases}", tuple(blocks))


def _first_line(label: str, texts: Iterable[str]) -> Iterator[Line]:
    """The first of several texts and the number of others."""
    different = [text for text in dict.fromkeys(texts) if text]
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        yield Line(f"{different[0]}{more}", label)


def _render_node(change: NodeChange) -> str:
    """The node's name and its former name."""
    return f"{change.node} (was {change.name_before})" if change.name_before else change.node


def _phases_alike(changes: Iterable[NodeChange]) -> list[tuple[str, list[NodeChange]]]:
    """Changes grouped by phases with the same nodes."""
    found: dict[tuple[str, ...], tuple[list[str], list[NodeChange]]] = {}
    for phase, members in groupby(changes, key=lambda change: change.phase):
        nodes = list(members)
        found.setdefault(tuple(node.node for node in nodes), ([], nodes))[0].append(phase)
    return [(listing(phases), nodes) for phases, nodes in found.values()]


def _other_names(diff: ReportDiff) -> Section | None:
    """Nodes on the same provider with another name or fused with other nodes."""
    renamed = [change for change in diff.renamed if change.before == change.after]
    if not (renamed or diff.fused_otherwise):
        return None
    blocks = []
    if renamed:
        names = list(dict.fromkeys(_render_node(change) for change in renamed))
        blocks.append(Line(f"{plural(len(names), 'node')} matched under a different number: {name_some(names, NAMES)}"))
    forms: dict[str, list[str]] = {}
    for change in diff.fused_otherwise:
        forms.setdefault(f"{change.before} -> {change.after}", []).append(change.node)
    for form, found in forms.items():
        nodes = list(dict.fromkeys(found))
        named = f"{form}: {name_some(nodes, NAMES)}"
        blocks.append(Line(f"{plural(len(nodes), 'node')} compiled or fused differently, {named}"))
    return Section("renamed", "Same provider, renamed or fused differently", tuple(blocks))


def _reasons(changes: Sequence[ReasonChange]) -> Section | None:
    """Changed reasons of nodes that did not move."""
    left = [change for change in changes if not change.moved]
    if not left:
        return None
    groups: dict[tuple[str, str], list[ReasonChange]] = {}
    for change in left:
        groups.setdefault((change.change, _render_reason(change)), []).append(change)
    blocks: list[Block] = [_reason(head, members) for (_, head), members in list(groups.items())[:GROUPS]]
    if len(groups) > GROUPS:
        blocks.append(Line(f"and {len(groups) - GROUPS} more; the JSON has all", tone="quiet"))
    return Section("reasons", "Reasons", tuple(blocks))


def _reason(head: str, members: Sequence[ReasonChange]) -> Group:
    """One changed reason with its nodes."""
    phases = listing(dict.fromkeys(member.phase for member in members))
    nodes = list(dict.fromkeys(member.node for member in members))
    shown = members[-1]
    blocks = [Line(name_some(nodes, NAMES), "nodes")]
    if shown.change != "gone":
        blocks += [Line(shown.evidence, f"evidence ({shown.evidence_kind})"), Line(shown.remedy, "remedy")]
    return Group(f"{head}: {plural(len(nodes), 'node')} in {phases}", tuple(blocks))


def _render_reason(change: ReasonChange) -> str:
    about = f"why not {named_provider(change.skipped)}: " if change.skipped else ""
    before, after = change.before or "unknown", change.after or "unknown"
    if change.change == "changed":
        return f"{about}{before} -> {after}, on {named_provider(change.provider)}"
    if change.change == "gone":
        return f"{about}no longer {before}"
    return f"{about}new: {after}, on {named_provider(change.provider)}"


def _copies(changes: Sequence[CopyChange]) -> Section | None:
    """New, removed and resized copies."""
    if not changes:
        return None
    alike: dict[tuple[str, ...], list[CopyChange]] = {}
    for change in changes:
        alike.setdefault((change.change, change.direction, change.what, *change.caused_by), []).append(change)
    phases = " / ".join(dict.fromkeys(change.phase for change in changes))
    blocks = (
        table(
            "Copies",
            (text_column(""), Column("bytes A"), Column("bytes B"), text_column("direction, tensor")),
            [_copy_row(same) for same in alike.values()],
            rest=lambda shown: f"and {plural(len(alike) - shown, 'more change')}; the JSON has all",
            obvious=True,
            most=GROUPS,
        ),
        Line(f"Bytes per run ({phases}); -: unknown."),
    )
    return Section("copies", "Copies", blocks, plural(len(changes), "change"))


def _whole(sizes: Iterable[int | None]) -> int | None:
    """Total size of a tensor's copies in a phase; None if one is unknown."""
    known = [*sizes]
    return None if None in known else sum(size or 0 for size in known)


def _copy_row(same: Sequence[CopyChange]) -> tuple[str, ...]:
    """One copy in every phase in which it changed."""
    change = same[0]
    phases = list(dict.fromkeys(entry.phase for entry in same))
    was, now = (
        " / ".join(human_bytes(_whole(size for phase, size in sizes if phase == name)) for name in phases)
        for sizes in (
            [(entry.phase, entry.bytes_before) for entry in same],
            [(entry.phase, entry.bytes_after) for entry in same],
        )
    )
    cells = {"new": ("", now), "gone": (was, ""), "changed": (was, now)}[change.change]
    only = "" if len(phases) > 1 else f", in {change.phase}"
    first, *others = change.caused_by or ("",)
    cause = f", for {first}{f' and {len(others)} more' if others else ''}" if first else ""
    border = "" if change.kind == "memcpy_node" else f"{change.kind.replace('_', ' ')}, "
    way = change.direction.replace("_", " ")
    return (change.change, *cells, f"{border}{way}: {change.what}{cause}{only}")


def _cost(diff: ReportDiff) -> Section:
    """Counts, sizes and times of both reports, with caveats."""
    shown = [
        figure for figure in diff.figures if figure.before != figure.after and not _is_repeated(figure, diff.figures)
    ]
    rows = [
        (
            figure.phase,
            FIGURES[figure.name],
            _render_figure(figure, figure.before),
            _render_figure(figure, figure.after),
            _render_ratio(figure),
        )
        for figure in shown
    ]
    heads = (text_column("phase"), text_column(""), Column("A"), Column("B"), Column("B / A"))
    blocks: list[Block] = [table("Figures of both", heads, rows, obvious=True) if rows else Line("No differences.")]
    if any(map(_is_within_spread, shown)):
        blocks.append(Line("~: not significant; each run's median step is within the other run's p95."))
    blocks += (Line(text, "note") for text in diff.notes)
    return Section("cost", "Cost", tuple(blocks))


def _is_repeated(figure: Figure, figures: Sequence[Figure]) -> bool:
    """Whether a per-run figure repeats the per-token figure, because runs have one token."""
    if figure.name != "copy_bytes_per_run":
        return False
    values = (figure.before, figure.after)
    return any(
        (other.before, other.after) == values
        for other in figures
        if other.phase == figure.phase and other.name == "copy_bytes_per_token"
    )


def _render_figure(figure: Figure, value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    if figure.name.startswith("copy_bytes"):
        return human_bytes(round(value))
    if figure.name == "host_wait_us_per_token":
        return decimals(value, 1e-3)
    return f"{value:,.0f}" if figure.spread == "counted" else decimals(value)


def _is_within_spread(figure: Figure) -> bool:
    """Whether the spread of step times explains the ratio."""
    return figure.ratio is not None and figure.spread == "within"


def _render_ratio(figure: Figure) -> str:
    """The ratio, marked if the spread of step times explains it."""
    if figure.ratio is None:
        return NOT_KNOWN
    return f"{decimals(figure.ratio)}{' ~' if _is_within_spread(figure) else ''}"
