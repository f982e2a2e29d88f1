"""Comparison of two packages, folders or ONNX files, except creation time and path; and of two support tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from partita.compare.rows import Comparison, Row, Side, compare_rows, field_rows
from partita.inspection.document import adapter_text, domain_name, shape_text, state_text, storage_text, summary
from partita.inspection.records import FileFacts, GraphFacts, Inspection
from partita.observations.grouping import grouped
from partita.observations.text_format import human_bytes, listing, plural
from partita.support.records import SupportTable, VersionEntry


def compare_packages(first: Inspection, second: Inspection) -> Comparison:
    """Differences of `second` from `first`. Files are compared by hash if both have one, else by size."""
    both = (first, second)
    sides = [Side(name=each.path, description=summary(each), created=each.provenance.created) for each in both]
    files = [_files(each) for each in both]
    hashed = {key for key in files[0] if all(key in own and own[key].sha256 for own in files)}
    rows = [(*_rows(each), *_file_rows(own, hashed)) for each, own in zip(both, files, strict=True)]
    found = compare_rows("package", sides, rows)
    counted = Counter(change.section for change in found.changes)
    headline = f"Different: {listing(f'{subject} ({count})' for subject, count in counted.items())}"
    if found.same:
        headline = "No differences"
        if not all(map(_is_hashed, both)):
            headline = "No known differences; file contents were not compared, because some files have no hash"
    return found.model_copy(update={"headline": headline})


def _is_hashed(found: Inspection) -> bool:
    """Whether every file, data files of the graphs included, has a hash or is missing."""
    known = {file.name for file in found.files if file.sha256 or file.size_bytes is None}
    data = {name for graph in found.graphs for name in graph.data_files}
    return bool(known) and known >= {*(file.name for file in found.files), *data}


def _files(found: Inspection) -> dict[tuple[str, str], FileFacts]:
    """Section and name of a row -> the file, with a size or a hash."""
    listed = [("provenance", f"checkpoint file {file.name}", file) for file in found.provenance.source_files]
    listed += [
        ("adapters", f"{adapter.name}: {source.name}", FileFacts.copy_of(source))
        for adapter in found.adapters
        for source in adapter.source
    ]
    listed += [("files", file.name, file) for file in found.files]
    return {(section, name): file for section, name, file in listed}


def _file_rows(files: Mapping[tuple[str, str], FileFacts], hashed: set[tuple[str, str]]) -> Iterator[Row]:
    """A row for each file."""
    for (section, name), file in files.items():
        text = "missing" if file.size_bytes is None else f"{file.size_bytes:,} bytes"
        text += f", SHA-256 {file.sha256[:16]}" if file.sha256 and (section, name) in hashed else ""
        yield Row(section, "", name, text)


def _rows(found: Inspection) -> Iterator[Row]:
    """The known facts, without files."""
    for section, record, hidden in (
        ("model", found.model, set[str]()),
        ("contract", found.contract, {"source"}),
        ("cache", found.cache, {"states"}),
        ("provenance", found.provenance, {"created", "source_files"}),
        ("tokenizer", found.tokenizer, {"files"}),
        ("licence", found.licence, {"source"}),
    ):
        if record is not None:
            yield from field_rows(section, "", record.model_dump(exclude=hidden))
    # Several graphs are matched by name, single graphs without it.
    for graph in found.graphs:
        yield from _graph(graph, "" if len(found.graphs) == 1 else f"{graph.file}: ")
    for state in found.cache.states if found.cache is not None else ():
        yield Row("cache", "", f"{state.past} -> {state.present}", f"{state.dtype} {state_text(state)}")
    for kind in found.weights.kinds:
        yield Row("weights", "", kind.dtype, f"{plural(kind.tensors, 'tensor')}, {human_bytes(kind.size_bytes)}")
    for name, modules in grouped(found.modules, lambda module: module.module or "(no module)").items():
        yield Row("modules", "", name, " + ".join(sorted(set(map(storage_text, modules)))))
    for adapter in found.adapters:
        yield Row("adapters", "", adapter.name, adapter_text(adapter))
    for finding in found.findings:
        yield Row("findings", "", finding.problem, "found")


GRAPH_PARTS = {"file", "size_bytes", "variant", "operators", "inputs", "outputs", "opsets", "data_files", "metadata"}
"""Fields of a graph that are compared in other rows, or that may differ between equal graphs."""


def _graph(graph: GraphFacts, prefix: str) -> Iterator[Row]:
    opsets = {f"opset {domain_name(domain)}": version for domain, version in graph.opsets.items()}
    yield from field_rows("graph", "", {**graph.model_dump(exclude=GRAPH_PARTS), **opsets}, prefix)
    yield from (Row("operators", "", f"{prefix}{name}", f"{nodes:,}") for name, nodes in graph.operators.items())
    for way, ports in (("input", graph.inputs), ("output", graph.outputs)):
        for port in ports:
            role = f", {port.role}" if port.role else ""
            text = f"{port.dtype} {shape_text(port.shape)}{role}"
            yield Row("inputs and outputs", "", f"{prefix}{way} {port.name}", text)


Variants = Mapping[str, Mapping[tuple[str, str], str]]
"""Operator version -> variant (kind and text) -> `supported` or `unsupported`."""


def compare_tables(before: SupportTable, after: SupportTable, *, names: tuple[str, str]) -> Comparison:
    """Compare variants that have an outcome in both tables. `names`: names of the two tables."""
    first, second = _variants(before), _variants(after)
    rows = (_table_rows(before, first, second), _table_rows(after, second, first))
    sides = [_side(table, name) for table, name in zip((before, after), names, strict=True)]
    found = compare_rows("support_table", sides, rows, counted=("variants",))
    made = found.of("variants")
    lost = sum(change.effect == "worse" for change in made)
    compared = sum(len(found.keys() & second[name].keys()) for name, found in first.items() if name in second)
    both = f"({plural(compared, 'variant')} in both tables)"
    text = f"no difference {both}"
    if made:
        versions = plural(len({change.group for change in made}), "operator version")
        lost_text = f"{plural(lost, 'variant')} no longer supported"
        text = f"{lost_text}, {len(made) - lost} newly supported, in {versions} {both}"
    return found.model_copy(update={"headline": text})


def _side(table: SupportTable, name: str) -> Side:
    """Summary of one table."""
    device = f" (dry run as {table.provider.device})" if table.provider.device else ""
    version = table.versions.onnxruntime_package or table.versions.onnxruntime
    return Side(
        name=name, description=f"{table.provider.name}{device}, {version}, {table.scope}", created=table.created
    )


def _table_rows(table: SupportTable, own: Variants, other: Variants) -> Iterator[Row]:
    """Versions and options, tested operator versions, and variants that are in both tables."""
    yield from field_rows("versions", "", table.versions.model_dump() | table.provider.model_dump(exclude={"name"}))
    for version, variants in own.items():
        yield Row("coverage", "", version, "tested")
        for variant, outcome in variants.items():
            if variant in other.get(version, {}):
                yield Row("variants", version, variant[1], outcome, (variant,), rank=int(outcome != "supported"))


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
    unsupported = (*types.rejected, *types.failed, *types.crashed)
    for outcome, rows in (("supported", types.supported), ("unsupported", unsupported)):
        for row in rows:
            named = (f"{name} {kind}" for name, kind in zip(types.variables, row, strict=True) if kind)
            yield ("types", ", ".join(named)), outcome
    for form in version.forms:
        if form.outcome in ("supported", "rejected", "failed", "crashed"):
            text = form.difference or ", ".join(form.factors) or "the example"
            yield (form.kind, text), "supported" if form.outcome == "supported" else "unsupported"
