"""Document of a support table: provider, operators of a model, support of every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.observations.text_format import decimals, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Block, Column, Document, Group, Line, Section, Table, pairs, table
from partita.support.records import Assignments, ModelNeed, OperatorEntry, SupportTable, VersionEntry

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
    return Document(
        kind="Support table",
        name=found.provider.name,
        headline=(headline(found),),
        sections=sections(found),
        created=found.created,
        version=found.partita_version,
    )


VIEWS = Views(document, unfold=True)


def sections(found: SupportTable) -> tuple[Section, ...]:
    """Every section that is not empty."""
    return (_measurement(found), *_needs(found), *_tables(found), *_gaps(found))


def _measurement(found: SupportTable) -> Section:
    """Provider, versions, and size of the measurement."""
    provider, versions = found.provider, found.versions
    device = f"dry run as {provider.device}" if provider.device else ", ".join(provider.devices)
    rows = [
        ("provider", f"{provider.name} ({provider.ort_name})" + (f", {device}" if device else "")),
        ("plugin", provider.plugin or ""),
        ("options", ", ".join(f"{name}={value}" for name, value in provider.options.items())),
        (
            "ONNX Runtime",
            f"{versions.onnxruntime_package or versions.onnxruntime}, operator set {versions.opset or '?'}",
        ),
        ("operators of", f"onnx {versions.onnx}"),
        ("machine", f"{versions.cpu}, {versions.operating_system}"),
        ("scope", found.scope),
        ("measured", _size(found)),
    ]
    return Section("asked", "Measurement", (pairs("Measurement", rows),))


def _size(found: SupportTable) -> str:
    """Variants, sessions and seconds."""
    counts = found.variants
    total = sum(counts.model_dump().values())
    parts = [f"{plural(total, 'variant')} in {plural(found.sessions, 'session')}, {decimals(found.seconds)} s"]
    parts += [
        f"{getattr(counts, name)} {word}" for name, word in (("invalid", "not valid models"), ("crashed", "crashed"))
    ]
    if not found.complete:
        parts.append(f"{counts.untested} untested after {found.budget_seconds:g} s (`seconds`)")
    return "; ".join(parts)


def _needs(found: SupportTable) -> Iterator[Section]:
    """Operators of the model with their support."""
    if found.model_operators:
        order = {"supported": 1}
        rows = [_need_row(need) for need in sorted(found.model_operators, key=lambda need: order.get(need.outcome, 0))]
        heads = ("operator", "types", Column("nodes"), "outcome")
        yield Section("model", "Operators of the model", (table("Operators of the model", heads, rows, obvious=True),))


def _need_row(need: ModelNeed) -> tuple[str, ...]:
    name = f"{need.domain}:{need.operator}" if need.domain else need.operator
    types = ", ".join(f"{variable} {kind}" for variable, kind in need.types.items() if not is_fixed(variable))
    return f"{name}-{need.since}", types, str(need.nodes), OUTCOMES[need.outcome]


def _tables(found: SupportTable) -> Iterator[Section]:
    """A section per domain; operators in alphabetical order."""
    domains: dict[str, list[OperatorEntry]] = {}
    for entry in found.operators:
        domains.setdefault(entry.domain, []).append(entry)
    for domain, entries in domains.items():
        name = domain or ONNX
        counts = Counter[str](entry.newest.verdict for entry in entries)
        about = ", ".join(f"{VERDICTS[verdict]}: {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        key = f"domain-{domain.replace('.', '-') or 'onnx'}"
        yield Section(
            key, f"Operators of {name}", tuple(_blocks(entries, whole=len(found.operators) <= FEW_OPERATORS)), about
        )


def _blocks(entries: Sequence[OperatorEntry], *, whole: bool) -> Iterator[Block]:
    """The newest version of each operator, with older versions folded; `whole`: all versions in one table."""
    if whole:
        yield _version_table(
            "Every version", [(entry, version) for entry in entries for version in entry.versions[::-1]]
        )
        yield from _messages(entries)
        return
    yield _version_table("The newest version of each operator", [(entry, entry.newest) for entry in entries])
    older = [(entry, version) for entry in entries for version in entry.versions[-2::-1]]
    if older:
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
    for condition in version.conditions:
        yield " or ".join(condition.factors)
    if version.unexplained:
        yield f"{plural(version.unexplained, 'form')} without a single deciding factor"


def _messages(entries: Sequence[OperatorEntry]) -> Iterator[Block]:
    """Messages of the provider about unsupported variants."""
    for entry in entries:
        for version in entry.versions[::-1]:
            for each in version.messages:
                yield Line(each.text, f"{entry.full_name}-{version.since}", "quiet")


def _gaps(found: SupportTable) -> Iterator[Section]:
    """Untested operators, and notes."""
    lines: list[Block] = [Line(note, "note", "quiet") for note in found.notes]
    if found.without_example:
        lines.append(
            Line(
                f"{plural(len(found.without_example), 'operator version')} not tested, because no valid form is known: "
                f"{', '.join(found.without_example)}",
                "untested",
                "quiet",
            )
        )
    untested = [
        f"{entry.full_name}-{version.since}"
        for entry in found.operators
        for version in entry.versions
        if version.verdict == "untested"
    ]
    if untested:
        lines.append(Line(", ".join(untested), "not tested in time", "quiet"))
    if lines:
        yield Section("gaps", "Not tested", tuple(lines))


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
    if len(moving) == 1:
        return ", ".join(row[0] for row in cut)
    names = [types.variables[at] for at in moving]
    columns = [list(dict.fromkeys(row[at] for row in cut)) for at in range(len(moving))]
    everything = {tuple(row[at] for at in moving) for row in _valid(types)}
    inside = sum(all(row[at] in columns[at] for at in range(len(moving))) for row in everything)
    if inside == len(cut):
        return "; ".join(f"{name}: {', '.join(column)}" for name, column in zip(names, columns, strict=True))
    if all(len(set(row)) == 1 for row in cut):
        return f"{' = '.join(names)}: {', '.join(row[0] for row in cut)}"
    groups = list(_grouped(cut)) if len(moving) == 2 else []
    if 0 < len(groups) <= MOST_GROUPS:
        return "; ".join(f"{names[0]} {', '.join(first)} with {names[1]} {', '.join(rest)}" for first, rest in groups)
    return f"{len(cut)} of {len(everything)} combinations of {', '.join(names)}"


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[str]]]:
    """Groups of first types with equal second types."""
    seconds: dict[str, list[str]] = {}
    for row in rows:
        seconds.setdefault(row[0], []).append(row[1])
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, listed in seconds.items():
        firsts.setdefault(tuple(listed), []).append(first)
    for others, found in firsts.items():
        yield found, list(others)
