"""What is different between two reports, said once for every view: the answer, then what stands behind it."""

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
    words,
)

NAMES = 12
"""Nodes that a group names; --json names all."""
GROUPS = 20
"""Most groups of a section, and most rows of its table."""
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


def document(diff: ReportDiff) -> Document:
    """Every section that has something to say."""
    found = (
        _reports(diff),
        _changes(diff),
        _nodes("moved", "Moved", diff.moved, _say_move),
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
    """Which two reports these are."""
    rows = tuple(
        (letter, (f"{side.name}: {side.what}, ONNX Runtime {side.onnxruntime}, {side.created}",))
        for letter, side in (("A", diff.before), ("B", diff.after))
    )
    return Section("reports", "Reports", (Pairs("Reports", rows),))


def _changes(diff: ReportDiff) -> Section | None:
    """Versions, options and states that are others."""
    if not diff.changes:
        return None
    # Another version is always another build, and what it was built with is a long text.
    another_version = any(change.key == "onnxruntime" for change in diff.changes)
    rows = [
        (change.subject.replace("_", " "), change.name, change.before or NOT_KNOWN, change.after or NOT_KNOWN)
        for change in diff.changes
        if change.key != "onnxruntime_build" or not another_version
    ]
    heads = [words(title) for title in ("in", "what", "A", "B")]
    return Section("around", "Environment and request", (table("What else is different", heads, rows, obvious=True),))


def _say_move(node: NodeChange) -> str:
    return f"{named_provider(node.before)} -> {named_provider(node.after)}"


def _nodes(key: str, title: str, changes: Sequence[NodeChange], say_way: Callable[[NodeChange], str]) -> Section | None:
    """Nodes in groups of one way and reason; phases with the same nodes share a group."""
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
    """Nodes of one way and reason: phases, operators, names and the evidence."""
    shared = [*_told("evidence", [member.evidence for member in members])]
    shared += _told("remedy", [member.remedy for member in members])
    alike = _phases_alike(members)
    for number, (phases, nodes) in enumerate(alike, 1):
        blocks: list[Block] = [
            Line(tally(Counter(node.op_type or "unknown" for node in nodes)), "operators"),
            Line(name_some([_say_node(node) for node in nodes], NAMES), "nodes"),
        ]
        inside = Counter(node.runs_in for node in nodes if node.runs_in)
        blocks += [Line(tally(inside), "as part of")] if inside else []
        blocks += shared if number == len(alike) else []
        yield Group(f"{head}, {plural(len(nodes), 'node')} in {phases}", tuple(blocks))


def _told(label: str, texts: Iterable[str]) -> Iterator[Line]:
    """The first of several texts, and how many others there are."""
    different = [text for text in dict.fromkeys(texts) if text]
    if different:
        more = f" (and {len(different) - 1} more like it)" if len(different) > 1 else ""
        yield Line(f"{different[0]}{more}", label)


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


def _other_names(diff: ReportDiff) -> Section | None:
    """Nodes that stayed where they were under another name, or beside other nodes."""
    renamed = [change for change in diff.renamed if change.before == change.after]
    if not (renamed or diff.fused_otherwise):
        return None
    blocks = []
    if renamed:
        names = list(dict.fromkeys(_say_node(change) for change in renamed))
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
    """Reasons of nodes that did not move; those of moved nodes stand with them."""
    left = [change for change in changes if not change.moved]
    if not left:
        return None
    groups: dict[tuple[str, str], list[ReasonChange]] = {}
    for change in left:
        groups.setdefault((change.change, _say_reason(change)), []).append(change)
    blocks: list[Block] = [_reason(head, members) for (_, head), members in list(groups.items())[:GROUPS]]
    if len(groups) > GROUPS:
        blocks.append(Line(f"and {len(groups) - GROUPS} more; the JSON has all", tone="quiet"))
    return Section("reasons", "Reasons", tuple(blocks))


def _reason(head: str, members: Sequence[ReasonChange]) -> Group:
    """What became of one reason, with its nodes."""
    phases = listing(dict.fromkeys(member.phase for member in members))
    nodes = list(dict.fromkeys(member.node for member in members))
    shown = members[-1]
    blocks = [Line(name_some(nodes, NAMES), "nodes")]
    if shown.change != "gone":
        blocks += [Line(shown.evidence, f"evidence ({shown.evidence_kind})"), Line(shown.remedy, "remedy")]
    return Group(f"{head}: {plural(len(nodes), 'node')} in {phases}", tuple(blocks))


def _say_reason(change: ReasonChange) -> str:
    about = f"why not {named_provider(change.skipped)}: " if change.skipped else ""
    before, after = change.before or "unknown", change.after or "unknown"
    if change.change == "changed":
        return f"{about}{before} -> {after}, on {named_provider(change.provider)}"
    if change.change == "gone":
        return f"{about}no longer {before}"
    return f"{about}new: {after}, on {named_provider(change.provider)}"


def _copies(changes: Sequence[CopyChange]) -> Section | None:
    """Copies that are new, gone or of another size."""
    if not changes:
        return None
    alike: dict[tuple[str, ...], list[CopyChange]] = {}
    for change in changes:
        alike.setdefault((change.change, change.direction, change.what, *change.caused_by), []).append(change)
    phases = " / ".join(dict.fromkeys(change.phase for change in changes))
    blocks = (
        table(
            "Copies",
            (words(""), Column("bytes A"), Column("bytes B"), words("way, tensor")),
            [_copy_row(same) for same in alike.values()],
            rest=lambda shown: f"and {plural(len(alike) - shown, 'more change')}; the JSON has all",
            obvious=True,
            most=GROUPS,
        ),
        Line(f"Bytes are per run: {phases}; - where unknown."),
    )
    return Section("copies", "Copies", blocks, plural(len(changes), "change"))


def _whole(sizes: Iterable[int | None]) -> int | None:
    """Of all copies of a tensor in a phase; None where one is not known."""
    known = [*sizes]
    return None if None in known else sum(size or 0 for size in known)


def _copy_row(same: Sequence[CopyChange]) -> tuple[str, ...]:
    """One copy in every phase that it changed in."""
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
    """Counts, sizes and times of both, with what they are worth."""
    shown = [
        figure for figure in diff.figures if figure.before != figure.after and not _said_twice(figure, diff.figures)
    ]
    rows = [
        (
            figure.phase,
            FIGURES[figure.name],
            _say_figure(figure, figure.before),
            _say_figure(figure, figure.after),
            _say_ratio(figure),
        )
        for figure in shown
    ]
    heads = (words("phase"), words(""), Column("A"), Column("B"), Column("B / A"))
    blocks: list[Block] = [table("Figures of both", heads, rows, obvious=True) if rows else Line("The same.")]
    if any(map(_is_within_spread, shown)):
        blocks.append(Line("~: the slower steps of each run are as slow as the median step of the other."))
    blocks += (Line(text, "note") for text in diff.notes)
    return Section("cost", "Cost", tuple(blocks))


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


def _is_within_spread(figure: Figure) -> bool:
    """Whether the spread of the steps within the runs explains the ratio."""
    return figure.ratio is not None and figure.spread == "within"


def _say_ratio(figure: Figure) -> str:
    """The ratio; marked where the spread of the steps within the runs explains it."""
    if figure.ratio is None:
        return NOT_KNOWN
    return f"{decimals(figure.ratio)}{' ~' if _is_within_spread(figure) else ''}"
