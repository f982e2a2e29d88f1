"""Headline and document of a comparison, for every view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partita.compare.rows import Change, Comparison, Value
from partita.observations.grouping import grouped
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
from partita.partition_reports.sections.model import Block, Column, Document, Group, Line, Section, pairs, table

NAMES = 12
"""Maximum number of names in a line; --json has all."""
GROUPS = 20
"""Maximum number of groups in a section."""
ROWS = 40
"""Maximum number of rows in a table."""
KINDS = {"report": "two reports", "package": "two packages", "support_table": "two support tables"}


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the document."""

    title: str
    sections: tuple[str, ...]
    """Sections of the comparison."""
    noun: str = ""
    """What is grouped by its change; empty: a table."""
    kind: str = ""
    """Only changes of this kind; empty: all."""
    folded: bool = False


AROUND = ("preferred_provider", "phases", "outcome", "context", "cache")
PARTS = {
    "around": Part("Environment and request", AROUND, folded=True),
    "moved": Part("Moved", ("nodes",), "node", "changed"),
    "added": Part("Added", ("nodes",), "node", "added"),
    "removed": Part("Removed", ("nodes",), "node", "removed"),
    "reasons": Part("Reasons", ("reasons",), "node"),
    "copies": Part("Copies", ("copies",), "copy"),
    "cost": Part("Cost", ("copy_count", "copy_bytes", "figures", "times")),
    "versions": Part("Versions and devices", ("versions",), folded=True),
    "operators": Part("Operators", ("variants",), "variant"),
    "coverage": Part("In one table only", ("coverage",), "operator version"),
}
"""Key -> section of the document; other sections of a comparison are tables under their own names."""


def document(found: Comparison) -> Document:
    """Every section that is not empty."""
    shown = {name for part in PARTS.values() for name in part.sections}
    others = dict.fromkeys(change.section for change in found.changes if change.section not in shown)
    sides = [
        (letter, ", ".join(filter(None, (f"{side.name}: {side.description}", side.created))))
        for letter, side in (("A", found.before), ("B", found.after))
    ]
    equal = Line(f"{plural(found.equal_rows, 'value')} equal in both", tone="quiet")
    sections = [Section("files", "Compared", (pairs("Compared", sides), equal), folded=True)]
    for key, part in (PARTS | {name.replace(" ", "-"): Part(name.capitalize(), (name,)) for name in others}).items():
        changes = [each for each in _unexplained(found, *part.sections) if part.kind in ("", each.kind)]
        notes = [Line(text, "note") for text in found.notes] if key == "cost" else []
        if changes or notes:
            blocks = list(_groups(part, changes) if part.noun else _table(part, changes))
            count = plural(len({change.name for change in changes}), part.noun) if part.kind else ""
            sections.append(Section(key, part.title, (*blocks, *notes), count, part.folded))
    return Document(
        kind=f"Difference of {KINDS[found.kind]}",
        name=f"{found.before.name} and {found.after.name}",
        headline=(found.headline,),
        sections=tuple(sections),
    )


VIEWS = Views(document)


def _unexplained(found: Comparison, *sections: str) -> list[Change]:
    """The changes of some sections, without reasons of nodes that changed, which are shown with the node."""
    nodes = {(change.group, change.name) for change in found.of("nodes")}
    return [each for each in found.of(*sections) if each.section != "reasons" or (each.group, each.name) not in nodes]


def _table(part: Part, changes: Sequence[Change]) -> Iterator[Block]:
    """A row for each change; equal changes of a group share a row."""
    order = list(dict.fromkeys(change.group for change in changes))
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for change in sorted(changes, key=lambda change: order.index(change.group)):
        rows.setdefault((change.group.replace("_", " "), *_texts(change), _ratio(change)), []).append(change.name)
    if not rows:
        yield Line("No differences.")
        return
    heads = ["phase" if part is PARTS["cost"] else "subject", "property", "A", "B", "B / A"]
    cells = [(group, name_some(names, NAMES), *others) for (group, *others), names in rows.items()]
    used = [column for column in range(len(heads)) if any(row[column] for row in cells)]
    columns = [Column(heads[column], number=part is PARTS["cost"] and column > 1) for column in used]
    yield table(part.title, columns, [[row[column] for column in used] for row in cells], obvious=True, most=ROWS)
    if any(change.details.get("spread") == "within" for change in changes):
        yield Line("~: not significant; each run's median step is within the other run's p95.")


def _groups(part: Part, changes: Iterable[Change]) -> Iterator[Block]:
    """Changes grouped by what changed; phases with the same names share a group."""
    ranked = sorted(grouped(changes, describe).items(), key=lambda item: -len(item[1]))
    for text, members in ranked[:GROUPS]:
        for groups, same in by_names(members):
            count, where = plural(len(same), part.noun), f" in {listing(groups)}" if any(groups) else ""
            yield Group(f"{text}, {count}{where}", tuple(_details(part, same)))
    if len(ranked) > GROUPS:
        left = sum(len(members) for _, members in ranked[GROUPS:])
        yield Line(f"and {plural(left, f'more {part.noun}')}; the JSON has all", tone="quiet")


def _details(part: Part, changes: Sequence[Change]) -> Iterator[Line]:
    """Operators, names, evidence and remedy of changes of one kind."""
    texts = {
        name: [text for change in changes if (text := change.details.get(name))]
        for name in ("operator", "part_of", "caused_by", "evidence", "remedy")
    }
    for name, label in (("operator", "operators"), ("part_of", "as part of")):
        if texts[name]:
            yield Line(tally(Counter(texts[name])), label)
    former = [(change.name, change.details.get("former_name")) for change in changes]
    names = [f"{name} (was {old})" if old else name for name, old in former]
    yield Line(name_some(names, NAMES), plural(2, part.noun).removeprefix("2 "))
    kind = changes[0].details.get("evidence_kind")
    for name, label in (("caused_by", "caused by"), ("evidence", f"evidence ({kind})"), ("remedy", "remedy")):
        if different := list(dict.fromkeys(texts[name])):
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            yield Line(f"{different[0]}{more}", label)


def by_names(changes: Iterable[Change]) -> list[tuple[list[str], list[Change]]]:
    """Groups (phases) with the same changed names, and the changes of the first of them."""
    groups = grouped(changes, lambda change: change.group)
    same_names = grouped(groups, lambda group: tuple(sorted(change.name for change in groups[group])))
    return [(names, groups[names[0]]) for names in same_names.values()]


def describe(change: Change) -> str:
    """What changed: `CUDA -> CPU: no_kernel_type`, `new: on CPU`, `gone: 4 KiB, host to device`."""
    before, after = _texts(change)
    text = {"added": f"new: {after}", "removed": f"gone: {before}", "changed": f"{before} -> {after}"}[change.kind]
    details = change.details
    about = [f": {details['reason']}"] if "reason" in details else []
    about += [f", {details[name].replace('_', ' ')}" for name in ("border", "direction") if name in details]
    if change.section == "reasons" and change.after is not None:
        about.append(f", on {named_provider(details['provider'])}")
    return "".join([text, *about])


def _texts(change: Change) -> tuple[str, str]:
    """Both values."""

    def text(value: Value) -> str:
        if change.section == "nodes":
            return named_provider(None if value is None else str(value))
        if value is None:
            return NOT_KNOWN
        if isinstance(value, str):
            return value
        if change.section == "copies" or change.name.startswith("bytes copied"):
            return human_bytes(round(value))
        return decimals(value) if change.section == "times" else f"{value:,.0f}"

    return text(change.before), text(change.after)


def _ratio(change: Change) -> str:
    """The second number divided by the first, marked if the spread of step times explains it; empty without numbers."""
    was, now = change.before, change.after
    if isinstance(was, str) or isinstance(now, str):
        return ""
    if not was or now is None:
        return NOT_KNOWN
    return f"{decimals(now / was)}{' ~' if change.details.get('spread') == 'within' else ''}"


# Headlines

NAMED = {
    ("environment", "onnxruntime"),
    ("environment", "onnxruntime package"),
    ("package", "precision"),
    ("package", "attention"),
    ("package", "manifest sha256"),
    ("model", "sha256"),
    ("request", "chain"),
    ("request", "phases"),
    ("dry run", "device"),
    ("checks", "checks failed"),
}
"""Subject and name of changes that the headline of two reports names; other changes are counted."""


def report_headline(found: Comparison) -> str:
    """One sentence about two reports."""
    if found.unrelated_reason:
        return f"not comparable: {found.unrelated_reason}"
    failed = [side.name for side in (found.before, found.after) if side.failure is not None]
    parts = [f"the run of {listing(dict.fromkeys(failed))} FAILED"] if failed else []
    parts.append("no difference in placement, reasons and copies" if found.same else ", ".join(_placement(found)))
    around = found.of(*AROUND)
    named = [each for each in around if (each.group, each.name) in NAMED or each.effect != "neutral"]
    for change in named:
        subject = f"{change.group} " if change.group in ("package", "model") else ""
        before, after = ("none" if value is None else value for value in (change.before, change.after))
        parts.append(f"{subject}{change.name} {before} -> {after}")
    left = len(around) - len(named)
    if left:
        parts.append(f"{plural(left, 'other change' if named else 'change')} of environment or request")
    return "; ".join(parts)


def _placement(found: Comparison) -> Iterator[str]:
    """Differences of nodes, reasons and copies."""
    if not any(change.kind == "changed" for change in found.of("nodes")):
        yield "no node moved"
    alike = grouped(_unexplained(found, "nodes", "reasons"), lambda change: (change.section, _verb(change)))
    for (section, text), changes in alike.items():
        for phases, same in by_names(changes):
            yield f"{plural(len(same), section.removesuffix('s'))} {text} in {listing(phases)}"
    counts, copies = found.of("copy_count"), found.of("copies")
    if counts:
        before, after = ("unknown" if value is None else value for value in (counts[-1].before, counts[-1].after))
        yield f"copies {before} -> {after} in {counts[-1].group}"
    elif copies:
        phase = copies[-1].group
        yield f"{plural(sum(change.group == phase for change in copies), 'changed copy')} in {phase}"


def _verb(change: Change) -> str:
    """`moved from CUDA to CPU`, `added`."""
    before, after = _texts(change)
    return f"moved from {before} to {after}" if (change.section, change.kind) == ("nodes", "changed") else change.kind


def describe_changes(changes: list[Change], found: Comparison) -> str:
    """Changes for the worse: `1 node: a/MatMul (prefill and decode: CUDA -> CPU: no_kernel_type)`."""
    same = grouped(changes, lambda change: (change.name, describe(change)))
    texts = [f"{name} ({listing(change.group for change in group)}: {text})" for (name, text), group in same.items()]
    nodes = f"{plural(len({change.name for change in changes}), 'node')}: "
    count = nodes if changes[0].section in ("nodes", "reasons") else ""
    new = [change for change in found.of("copies") if changes[0].section == "copy_count" and change.kind == "added"]
    more = f"; new: {name_some(dict.fromkeys(change.name for change in new))}" if new else ""
    return f"{count}{name_some(texts)}{more}"
