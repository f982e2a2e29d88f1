"""The answer of a comparison in one sentence: what moved, what is copied now, which version changed. Pure."""

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
"""Subject and key of changes that the sentence tells; others are counted."""


def headline(diff: ReportDiff) -> str:
    """One sentence. Names come from the reports as they are: a view has to make them harmless."""
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
        told = f"no difference in placement, reasons and copies ({where})"
    else:
        told = ", ".join(_placement(diff))
    return "; ".join([*head, told, *around])


def _placement(diff: ReportDiff) -> Iterator[str]:
    """What is different about nodes, reasons and copies."""
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
    """Moved nodes per way, most first; phases with the same nodes share a part."""
    ways: dict[tuple[str, str], list[NodeChange]] = {}
    for change in moved:
        ways.setdefault((named_provider(change.before), named_provider(change.after)), []).append(change)
    for (before, after), changes in sorted(ways.items(), key=lambda way: -len(way[1])):
        for count, phases in _by_count(changes):
            yield f"{plural(count, 'node')} moved from {before} to {after} in {phases}"


def _by_count(changes: Iterable[NodeChange | ReasonChange]) -> Iterator[tuple[int, str]]:
    """How many nodes, in which phases: phases with the same nodes together."""
    nodes: dict[str, list[str]] = {}
    for change in changes:
        nodes.setdefault(change.phase, []).append(change.node)
    alike: dict[tuple[str, ...], list[str]] = {}
    for phase, names in nodes.items():
        alike.setdefault(tuple(sorted(names)), []).append(phase)
    for shared, phases in alike.items():
        yield len(shared), listing(phases)


def _copies(diff: ReportDiff) -> Iterator[str]:
    """How many copies more or fewer in the phase that is run for every token, and their bytes."""
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
    moved = _say_bytes(size, figures.get((phase, "copy_bytes_per_run")))
    unknown = count.before is None or count.after is None
    more = 0 if unknown else int((count.after or 0) - (count.before or 0))
    told = [change for change in diff.copies if change.phase == phase]
    if more != sum((change.change == "new") - (change.change == "gone") for change in told):
        moved = ""  # of those in control-flow subgraphs nobody knows the size
    if more:
        word = "more" if more > 0 else "fewer"
        yield f"{plural(abs(more), f'{word} copy')} in {phase}{moved}"
    elif told:
        yield f"{plural(len(told), 'change')} among the copies of {phase}{moved}"
    elif unknown and count.before != count.after:
        yield f"copies in control-flow subgraphs counted in one report only, in {phase}"
    elif diff.copies:
        phases = list(dict.fromkeys(change.phase for change in diff.copies))
        yield f"{plural(len(diff.copies), 'change')} among the copies of {listing(phases)}"


def _say_bytes(per_token: Figure | None, per_run: Figure | None) -> str:
    """` (+1.2 MiB per token)`; per run where there are no tokens, empty where nothing is known."""
    for figure, unit in ((per_token, "token"), (per_run, "run")):
        if figure is not None and figure.before is not None and figure.after is not None:
            unit = "run" if figure.name == "copy_bytes_per_run" else unit
            grown = round(figure.after - figure.before)
            return f" ({'+' if grown >= 0 else '-'}{human_bytes(abs(grown))} per {unit})"
    return ""


def _versions(diff: ReportDiff) -> Iterator[str]:
    """Versions and requests that changed: what matters most by name, the rest as a count."""
    told = [change for change in diff.changes if (change.subject, change.key) in NAMED or change.cache_moved]
    for change in told:
        subject = f"{change.subject} " if change.subject in ("package", "model") else ""
        yield f"{subject}{change.name} {change.before or 'none'} -> {change.after or 'none'}"
    left = len(diff.changes) - len(told)
    if left:
        yield f"{plural(left, 'other change')} around it" if told else f"{plural(left, 'change')} around it"
