"""One-sentence summary of a comparison. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from partita.diff.records import Figure, NodeChange, ReasonChange, ReportDiff
from partita.observations.text_format import human_bytes, listing, named_provider, plural

NAMED = {
    ("environment", "onnxruntime"),
    ("environment", "onnxruntime_package"),
    ("package", "precision"),
    ("package", "attention"),
    ("package", "manifest_sha256"),
    ("model", "sha256"),
    ("request", "chain"),
    ("request", "phases"),
    ("dry_run", "device"),
    ("checks", "checks_failed"),
}
"""Subject and key of changes that the summary names; other changes are counted."""


def headline(diff: ReportDiff) -> str:
    """The summary. Names are not sanitised."""
    if diff.unrelated:
        return f"not comparable: {diff.unrelated}"
    failed = [side.name for side in (diff.before, diff.after) if side.failed is not None]
    head = [f"the run of {listing(dict.fromkeys(failed))} FAILED"] if failed else []
    around = list(_versions(diff))
    if diff.same:
        counts: dict[int, list[str]] = {}
        for figure in diff.figures:
            if figure.name == "nodes":
                counts.setdefault(int(figure.after or 0), []).append(figure.phase)
        where = listing(f"{plural(count, 'node')} in {listing(phases)}" for count, phases in counts.items())
        placement = f"no difference in placement, reasons and copies ({where})"
    else:
        placement = ", ".join(_placement(diff))
    return "; ".join([*head, placement, *around])


def _placement(diff: ReportDiff) -> Iterator[str]:
    """Differences of nodes, reasons and copies."""
    yield from _movements(diff.moved)
    if not diff.moved:
        yield "no node moved"
    for verb, nodes in (("added", diff.came), ("removed", diff.gone)):
        for count, phases in _by_count(nodes):
            yield f"{plural(count, 'node')} {verb} in {phases}"
    others = [change for change in diff.reasons if not change.moved]
    for change, noun in (("new", "new reason"), ("changed", "changed reason"), ("gone", "reason")):
        for count, phases in _by_count(entry for entry in others if entry.change == change):
            yield f"{plural(count, noun)}{' gone' if change == 'gone' else ''} in {phases}"
    yield from _copies(diff)


def _movements(moved: Iterable[NodeChange]) -> Iterator[str]:
    """Moved nodes by providers, the most first; phases with the same nodes share a text."""
    ways: dict[tuple[str, str], list[NodeChange]] = {}
    for change in moved:
        ways.setdefault((named_provider(change.before), named_provider(change.after)), []).append(change)
    for (before, after), changes in sorted(ways.items(), key=lambda way: -len(way[1])):
        for count, phases in _by_count(changes):
            yield f"{plural(count, 'node')} moved from {before} to {after} in {phases}"


def _by_count(changes: Iterable[NodeChange | ReasonChange]) -> Iterator[tuple[int, str]]:
    """Number of nodes and phases; phases with the same nodes are merged."""
    nodes: dict[str, list[str]] = {}
    for change in changes:
        nodes.setdefault(change.phase, []).append(change.node)
    alike: dict[tuple[str, ...], list[str]] = {}
    for phase, names in nodes.items():
        alike.setdefault(tuple(sorted(names)), []).append(phase)
    for shared, phases in alike.items():
        yield len(shared), listing(phases)


def _copies(diff: ReportDiff) -> Iterator[str]:
    """Change of the number and bytes of copies, in decode or the last phase."""
    figures = {(figure.phase, figure.name): figure for figure in diff.figures}
    phases = [phase for phase, name in figures if name == "copies"]
    if not phases:
        return
    phase = "decode" if "decode" in phases else phases[-1]
    differ = [each for each in phases if figures[each, "copies"].before != figures[each, "copies"].after]
    if differ and phase not in differ and not diff.copies:  # in control-flow subgraphs of another phase
        phase = differ[0]
    count = figures[phase, "copies"]
    size = figures.get((phase, "copy_bytes_per_token")) or figures.get((phase, "copy_bytes_per_run"))
    moved = _render_bytes(size, figures.get((phase, "copy_bytes_per_run")))
    unknown = count.before is None or count.after is None
    more = 0 if unknown else int((count.after or 0) - (count.before or 0))
    changes = [change for change in diff.copies if change.phase == phase]
    if more != sum((change.change == "new") - (change.change == "gone") for change in changes):
        moved = ""  # the size of copies in control-flow subgraphs is unknown
    if more:
        word = "more" if more > 0 else "fewer"
        yield f"{plural(abs(more), f'{word} copy')} in {phase}{moved}"
    elif changes:
        yield f"{plural(len(changes), 'changed copy')} in {phase}{moved}"
    elif unknown and count.before != count.after:
        yield f"copies in control-flow subgraphs counted in one report only, in {phase}"
    elif diff.copies:
        phases = list(dict.fromkeys(change.phase for change in diff.copies))
        yield f"{plural(len(diff.copies), 'changed copy')} in {listing(phases)}"


def _render_bytes(per_token: Figure | None, per_run: Figure | None) -> str:
    """` (+1.2 MiB per token)`, or per run without tokens; empty if unknown."""
    for figure, unit in ((per_token, "token"), (per_run, "run")):
        if figure is not None and figure.before is not None and figure.after is not None:
            unit = "run" if figure.name == "copy_bytes_per_run" else unit
            grown = round(figure.after - figure.before)
            return f" ({'+' if grown >= 0 else '-'}{human_bytes(abs(grown))} per {unit})"
    return ""


def _versions(diff: ReportDiff) -> Iterator[str]:
    """Changes of versions and request: those in `NAMED` by name, the rest as a count."""
    named = [change for change in diff.changes if (change.subject, change.key) in NAMED or change.cache_moved]
    for change in named:
        subject = f"{change.subject} " if change.subject in ("package", "model") else ""
        yield f"{subject}{change.name} {change.before or 'none'} -> {change.after or 'none'}"
    left = len(diff.changes) - len(named)
    if left:
        yield f"{plural(left, 'other change' if named else 'change')} of environment or request"
