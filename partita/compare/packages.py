"""Comparison of two packages, folders or ONNX files, except creation time and path; and of two support tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from partita.compare.rows import Comparison, Row, Rule, Side, compare_rows
from partita.inspection.document import adapter_text, domain_name, shape_text, state_text, storage_text, summary
from partita.inspection.records import FileFacts, GraphFacts, Inspection
from partita.observations.records import Record
from partita.observations.text_format import human_bytes, listing, plural
from partita.partition_reports.groups import grouped
from partita.support.records import SupportTable, VersionEntry

Fact = tuple[str, str, str | FileFacts | None]
"""Subject, name and value; None if the value is unknown."""


def compare_packages(first: Inspection, second: Inspection) -> Comparison:
    """Differences of `second` from `first`."""
    files = Rule(is_same=_is_same_file)
    rules = {"files": files, "provenance": files, "adapters": files}
    changes, equal = compare_rows(_rows(first), _rows(second), rules)
    counted = Counter(change.section for change in changes)
    headline = f"Different: {listing(f'{subject} ({count})' for subject, count in counted.items())}"
    if not changes:
        headline = "No differences"
        if not (_is_hashed(first) and _is_hashed(second)):
            headline = "No known differences; file contents were not compared, because some files have no hash"
    sides = [
        Side(name=each.path, description=summary(each), created=each.provenance.created) for each in (first, second)
    ]
    return Comparison(
        kind="package",
        headline=headline,
        before=sides[0],
        after=sides[1],
        same=not changes,
        changes=changes,
        equal_rows=equal,
    )


def _is_same_file(was: Row, now: Row) -> bool:
    """Files are compared by hash if both have one, else by size; other values by their text."""
    ours, theirs = was.source, now.source
    if isinstance(ours, FileFacts) and isinstance(theirs, FileFacts) and None in (ours.sha256, theirs.sha256):
        return ours.size_bytes == theirs.size_bytes
    return was.value == now.value


def _is_hashed(found: Inspection) -> bool:
    """Whether every file has a hash or is missing."""
    known = {file.name for file in found.files if file.sha256 or file.size_bytes is None}  # or missing
    return bool(known) and known >= {
        *(file.name for file in found.files),
        *(name for graph in found.graphs for name in graph.data_files),
    }


def _rows(found: Inspection) -> Iterator[Row]:
    """The known facts."""
    for subject, name, value in _facts(found):
        if value:
            if isinstance(value, str):
                text = value
            else:
                text = "missing" if value.size_bytes is None else f"{value.size_bytes:,} bytes"
                text += f", SHA-256 {value.sha256[:16]}" if value.sha256 else ""
            yield Row(subject, "", name, text, source=value)


def _facts(found: Inspection) -> Iterator[Fact]:
    yield from _fields("model", found.model)
    if found.contract is not None:
        yield from _fields("contract", found.contract, {"source"})
    # Several graphs are matched by name, single graphs without it.
    for graph in found.graphs:
        yield from _graph(graph, "" if len(found.graphs) == 1 else f"{graph.file}: ")
    if (cache := found.cache) is not None:
        yield from _fields("cache", cache, {"states"})
        for state in cache.states:
            yield "cache", f"{state.past} -> {state.present}", f"{state.dtype} {state_text(state)}"
    for kind in found.weights.kinds:
        yield "weights", kind.dtype, f"{plural(kind.tensors, 'tensor')}, {human_bytes(kind.size_bytes)}"
    for name, modules in grouped(found.modules, lambda module: module.module or "(no module)").items():
        yield "modules", name, " + ".join(sorted(set(map(storage_text, modules))))
    made = found.provenance
    yield from _fields("provenance", made, {"created", "source_files"})
    for file in made.source_files:
        yield "provenance", f"checkpoint file {file.name}", file
    for adapter in found.adapters:
        yield "adapters", adapter.name, adapter_text(adapter)
        for source in adapter.source:
            yield "adapters", f"{adapter.name}: {source.name}", FileFacts.copy_of(source)
    for file in found.files:
        yield "files", file.name, file
    yield from _fields("tokenizer", found.tokenizer, {"files"})
    yield from _fields("licence", found.licence, {"source"})
    for finding in found.findings:
        yield "findings", finding.problem, "found"


def _fields(subject: str, record: Record, exclude: Collection[str] = (), prefix: str = "") -> Iterator[Fact]:
    """The fields of a record by name; a mapping has a row for each key."""
    for name, value in record.model_dump(exclude=set(exclude)).items():
        values = value if isinstance(value, dict) else {"": value}
        for key, each in values.items():
            text = f"{each:,}" if type(each) is int else str(each)
            yield subject, f"{prefix}{name.replace('_', ' ')} {key}".strip(), None if each is None else text


GRAPH_PARTS = ("file", "size_bytes", "variant", "operators", "inputs", "outputs", "opsets", "data_files", "metadata")
"""Fields of a graph that are compared in other rows, or that may differ between equal graphs."""


def _graph(graph: GraphFacts, prefix: str) -> Iterator[Fact]:
    yield from _fields("graph", graph, GRAPH_PARTS, prefix)
    for domain, version in graph.opsets.items():
        yield "graph", f"{prefix}opset {domain_name(domain)}", str(version)
    for entry in graph.operators:
        yield "operators", f"{prefix}{f'{entry.domain}:' if entry.domain else ''}{entry.operator}", f"{entry.nodes:,}"
    for way, ports in (("input", graph.inputs), ("output", graph.outputs)):
        for port in ports:
            role = f", {port.role}" if port.role else ""
            yield "inputs and outputs", f"{prefix}{way} {port.name}", f"{port.dtype} {shape_text(port.shape)}{role}"


TESTED = ("supported", "rejected", "failed", "crashed")
Variants = Mapping[str, Mapping[tuple[str, str], str]]
"""Operator version -> variant (kind and text) -> `supported` or `unsupported`."""


def compare_tables(before: SupportTable, after: SupportTable, *, names: tuple[str, str]) -> Comparison:
    """Compare variants that have an outcome in both tables. `names`: names of the two tables."""
    first, second = _variants(before), _variants(after)
    rules = {"variants": Rule(is_worse=lambda was, now: now is not None and now.value == "unsupported")}
    changes, equal = compare_rows(_table_rows(before, first, second), _table_rows(after, second, first), rules)
    sides = [_side(table, name) for table, name in zip((before, after), names, strict=True)]
    made = [change for change in changes if change.section == "variants"]
    lost = sum(change.effect == "worse" for change in made)
    compared = sum(len(found.keys() & second[name].keys()) for name, found in first.items() if name in second)
    text = f"no difference ({plural(compared, 'variant')} in both tables)"
    if made:
        text = (
            f"{plural(lost, 'variant')} no longer supported, {len(made) - lost} newly supported, in "
            f"{plural(len({change.group for change in made}), 'operator version')} "
            f"({plural(compared, 'variant')} in both tables)"
        )
    return Comparison(
        kind="support_table",
        headline=text,
        before=sides[0],
        after=sides[1],
        same=not made,
        changes=changes,
        equal_rows=equal,
    )


def _side(table: SupportTable, name: str) -> Side:
    """Summary of one table."""
    device = f" (dry run as {table.provider.device})" if table.provider.device else ""
    version = table.versions.onnxruntime_package or table.versions.onnxruntime
    return Side(
        name=name, description=f"{table.provider.name}{device}, {version}, {table.scope}", created=table.created
    )


def _table_rows(table: SupportTable, own: Variants, other: Variants) -> Iterator[Row]:
    """Versions and options, tested operator versions, and variants that are in both tables."""
    provider = table.provider
    found: dict[str, Any] = {**table.versions.model_dump(), **provider.model_dump(exclude={"options", "name"})}
    found |= {f"option {name}": value for name, value in provider.options.items()}
    for name, value in found.items():
        if value:
            yield Row("versions", "", name, ", ".join(value) if isinstance(value, tuple) else str(value))
    for version, variants in own.items():
        yield Row("coverage", "", version, "tested")
        for variant, outcome in variants.items():
            if variant in other.get(version, {}):
                yield Row("variants", version, variant[1], outcome, (variant,))


def _variants(table: SupportTable) -> Variants:
    """Every variant with an outcome."""
    found = {
        f"{entry.full_name}-{version.since}": dict(_outcomes(version))
        for entry in table.operators
        for version in entry.versions
    }
    return {name: variants for name, variants in found.items() if variants}


def _outcomes(version: VersionEntry) -> Iterator[tuple[tuple[str, str], str]]:
    """Type assignments, and forms by their difference from the example, or by factors if there is none."""
    types = version.types
    for outcome, rows in (
        ("supported", types.supported),
        ("unsupported", (*types.rejected, *types.failed, *types.crashed)),
    ):
        for row in rows:
            named = (f"{name} {kind}" for name, kind in zip(types.variables, row, strict=True) if kind)
            yield ("types", ", ".join(named)), outcome
    for form in version.forms:
        if form.outcome in TESTED:
            text = form.difference or ", ".join(form.factors) or "the example"
            yield (form.kind, text), "supported" if form.outcome == "supported" else "unsupported"
