"""Document of a support table: provider, operators of a model, support of every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.observations.grouping import grouped
from partita.observations.text_format import decimals, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Document,
    Group,
    Line,
    Section,
    Table,
    fields_of,
    pairs,
    table,
)
from partita.support.records import Assignments, OperatorEntry, SupportTable, VersionEntry

FEW_OPERATORS = 8
"""Maximum number of operators shown with all their versions."""
VERDICTS = {
    "supported": "yes",
    "partly": "in part",
    "rejected": "no",
    "invalid": "not a valid model",
    "untested": "untested",
}
OUTCOMES = {
    "supported": "supported",
    "rejected": "not supported",
    "failed": "assigned, but the session fails",
    "crashed": "crashes",
    "invalid": "not a valid model",
    "untested": "untested",
}
ONNX = "ONNX"
Row = tuple[str, ...]
MOST_GROUPS = 6
"""Maximum listed groups of types."""


def headline(found: SupportTable) -> str:
    """One-sentence summary."""
    name = found.provider.name
    if found.model_operators:
        nodes = Counter[str]()
        for need in found.model_operators:
            nodes[need.outcome] += need.nodes
        rest = ", ".join(f"{OUTCOMES[outcome]}: {count}" for outcome, count in nodes.items() if outcome != "supported")
        return f"{name} supports {nodes['supported']} of {plural(nodes.total(), 'node')} by operator and type" + (
            f" ({rest})" if rest else ""
        )
    counts = Counter(entry.newest.verdict for entry in found.operators)
    if len(found.operators) == 1:
        (entry,) = found.operators
        return f"{entry.full_name} on {name}: {VERDICTS[entry.newest.verdict]}, in version {entry.newest.since}"
    parts = [f"{counts['supported']} fully", f"{counts['partly']} in part", f"{counts['rejected']} not at all"]
    untested = f", {counts['untested']} untested" if counts["untested"] else ""
    return f"{name} supports, of {plural(len(found.operators), 'operator')}: {', '.join(parts)}{untested}"


def document(found: SupportTable) -> Document:
    """The document."""
    provider, size = found.provider, [("scope", found.scope), ("measured", _size(found))]
    simulated = ("dry run as", provider.device)
    rows = [*fields_of(provider, "device"), simulated, *fields_of(found.versions), *size]
    measurement = Section("asked", "Measurement", (pairs("Measurement", rows),))
    return Document(
        kind="Support table",
        name=found.provider.name,
        headline=(headline(found),),
        sections=(measurement, _needs(found), *_tables(found), _gaps(found)),
        created=found.created,
        version=found.partita_version,
    )


VIEWS = Views(document, unfold=True)


def _size(found: SupportTable) -> str:
    """Variants, sessions and seconds."""
    counts = found.variants
    total = sum(counts.values())
    parts = [f"{plural(total, 'variant')} in {plural(found.sessions, 'session')}, {decimals(found.seconds)} s"]
    parts += [f"{counts['invalid']} not valid models", f"{counts['crashed']} crashed"]
    if not found.complete:
        parts.append(f"{counts['untested']} untested after {found.budget_seconds:g} s (`seconds`)")
    return "; ".join(parts)


def _needs(found: SupportTable) -> Section:
    """Operators of the model with their support, the unsupported ones first."""
    rows = []
    for need in sorted(found.model_operators, key=lambda need: need.outcome == "supported"):
        name = f"{need.domain}:{need.operator}" if need.domain else need.operator
        types = ", ".join(f"{variable} {kind}" for variable, kind in need.types.items() if not is_fixed(variable))
        rows.append((f"{name}-{need.since}", types, str(need.nodes), OUTCOMES[need.outcome]))
    heads = ("operator", "types", Column("nodes"), "outcome")
    return Section("model", "Operators of the model", (table("Operators of the model", heads, rows, obvious=True),))


def _tables(found: SupportTable) -> Iterator[Section]:
    """A section per domain; operators in alphabetical order."""
    whole = len(found.operators) <= FEW_OPERATORS
    for domain, entries in grouped(found.operators, lambda entry: entry.domain).items():
        counts = Counter[str](entry.newest.verdict for entry in entries)
        about = ", ".join(f"{VERDICTS[verdict]}: {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        key = f"domain-{domain.replace('.', '-') or 'onnx'}"
        yield Section(key, f"Operators of {domain or ONNX}", tuple(_blocks(entries, whole=whole)), about)


def _blocks(entries: Sequence[OperatorEntry], *, whole: bool) -> Iterator[Block]:
    """The newest version of each operator, with older versions folded.

    `whole`: all versions in one table, and the messages of the provider about unsupported variants.
    """
    every = [(entry, version) for entry in entries for version in entry.versions[::-1]]
    older = [(entry, version) for entry, version in every if version is not entry.newest]
    if whole:
        yield _version_table("Every version", every)
        for entry, version in every:
            name = f"{entry.full_name}-{version.since}"
            yield from (Line(message.text, name, "quiet") for message in version.messages)
        return
    yield _version_table("The newest version of each operator", [(entry, entry.newest) for entry in entries])
    yield Group(f"Older versions ({len(older)})", (_version_table("Older versions", older),), folded=True)


def _version_table(caption: str, rows: Sequence[tuple[OperatorEntry, VersionEntry]]) -> Table:
    """One row per version of an operator."""
    heads = ("operator", "supported", "supported types", "unsupported types", "unsupported forms")
    cells = [
        (
            f"{entry.full_name}-{version.since}",
            VERDICTS[version.verdict],
            supported_text(version.types),
            refused_text(version.types),
            "; ".join(_conditions(version)),
        )
        for entry, version in rows
    ]
    return table(caption, heads, cells, obvious=True)


def _conditions(version: VersionEntry) -> Iterator[str]:
    """Conditions under which forms are unsupported."""
    yield from (" or ".join(condition.factors) for condition in version.conditions)
    if version.unexplained:
        yield f"{plural(version.unexplained, 'form')} without a single deciding factor"


def _gaps(found: SupportTable) -> Section:
    """Untested operators, and notes."""
    unknown = f"{plural(len(found.without_example), 'operator version')} not tested, because no valid form is known: "
    unknown += ", ".join(found.without_example)
    untested = ", ".join(
        f"{entry.full_name}-{version.since}"
        for entry in found.operators
        for version in entry.versions
        if version.verdict == "untested"
    )
    lines = [(note, "note") for note in found.notes]
    lines += [(unknown if found.without_example else "", "untested"), (untested, "not tested in time")]
    return Section("gaps", "Not tested", tuple(Line(text, label, "quiet") for text, label in lines))


# --- types in words ---


def supported_text(types: Assignments) -> str:
    """Supported types as text of a table cell."""
    if not types.supported:
        return "none" if _refused(types) else "-"
    text = _described(types, types.supported)
    if not _refused(types) and not types.untested and len(types.supported) > 1:
        text = f"all: {text}"
    if not types.replaced:
        return text
    return f"{text} ({'' if len(types.replaced) == len(types.supported) else 'some '}replaced)"


def refused_text(types: Assignments) -> str:
    """Valid but unsupported types as text of a table cell."""
    listed = _refused(types)
    if not listed or len(_moving_variables(types)) < 2:
        return _described(types, listed) if listed else ""
    return f"the other {plural(len(listed), 'combination')}" if types.supported else f"all {len(listed)} combinations"


def _refused(types: Assignments) -> tuple[Row, ...]:
    """Valid but unsupported assignments."""
    return (*types.rejected, *types.failed, *types.crashed)


def _valid(types: Assignments) -> tuple[Row, ...]:
    """Assignments that are valid models."""
    return (*types.supported, *_refused(types))


def is_fixed(variable: str) -> bool:
    """Whether it is the only type of an input instead of a type variable."""
    return "(" in variable


def _moving_variables(types: Assignments) -> list[int]:
    """Indices of the variables with more than one type."""
    return [at for at in range(len(types.variables)) if len({row[at] for row in _valid(types)}) > 1]


def _described(types: Assignments, rows: Sequence[Row]) -> str:
    """Text for some assignments: types per variable if they are a product, else groups, else a count."""
    moving = _moving_variables(types)
    if not moving:
        own = zip(types.variables, rows[0], strict=True) if rows else ()
        return ", ".join(kind for name, kind in own if kind and not is_fixed(name)) or "yes"
    cut = list(dict.fromkeys(tuple(row[at] for at in moving) for row in rows))
    names = [types.variables[at] for at in moving]
    columns = [list(dict.fromkeys(row[at] for row in cut)) for at in range(len(moving))]
    everything = {tuple(row[at] for at in moving) for row in _valid(types)}
    inside = sum(all(row[at] in columns[at] for at in range(len(moving))) for row in everything)
    if inside == len(cut):
        heads = [f"{name}: " for name in names] if len(names) > 1 else [""]
        return "; ".join(f"{head}{', '.join(column)}" for head, column in zip(heads, columns, strict=True))
    if all(len(set(row)) == 1 for row in cut):
        return f"{' = '.join(names)}: {', '.join(row[0] for row in cut)}"
    if len(moving) == 2:
        seconds = grouped(cut, lambda row: row[0])
        groups = grouped(seconds, lambda first: ", ".join(row[1] for row in seconds[first]))
        texts = (f"{names[0]} {', '.join(firsts)} with {names[1]} {rest}" for rest, firsts in groups.items())
        if len(groups) <= MOST_GROUPS:
            return "; ".join(texts)
    return f"{len(cut)} of {len(everything)} combinations of {', '.join(names)}"
