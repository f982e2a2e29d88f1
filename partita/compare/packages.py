"""Comparison of two packages, folders or ONNX files, except creation time and path; and of two support tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from partita.compare.rows import Comparison, Row, Rule, Side, compare_rows
from partita.inspection.document import adapter_text, domain_name, shape_text, state_text, storage_text, summary
from partita.inspection.records import FileFacts, GraphFacts, Inspection
from partita.observations.text_format import human_bytes, listing, plural
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
    model = found.model
    yield "model", "type", model.model_type
    yield "model", "architecture", model.architecture
    yield "model", "parameters", None if model.parameters is None else f"{model.parameters:,}"
    yield "model", "precision", model.precision
    yield "model", "attention", model.attention
    yield "model", "layout", model.layout
    if found.contract is not None:
        for name, value in found.contract.model_dump(exclude={"source"}).items():
            yield "contract", name.replace("_", " "), None if value is None else str(value)
    # Several graphs are matched by name, single graphs without it.
    for graph in found.graphs:
        yield from _graph(graph, "" if len(found.graphs) == 1 else f"{graph.file}: ")
    yield from _states(found)
    yield from _weights(found)
    yield from _companions(found)
    for finding in found.findings:
        yield "findings", finding.problem, "found"


def _graph(graph: GraphFacts, prefix: str) -> Iterator[Fact]:
    yield "graph", f"{prefix}nodes", f"{graph.nodes + graph.subgraph_nodes:,}"
    yield "graph", f"{prefix}phase", graph.phase
    yield "graph", f"{prefix}IR version", str(graph.ir_version)
    yield "graph", f"{prefix}producer", graph.producer
    for domain, version in graph.opsets.items():
        yield "graph", f"{prefix}opset {domain_name(domain)}", str(version)
    for entry in graph.operators:
        yield "operators", f"{prefix}{f'{entry.domain}:' if entry.domain else ''}{entry.operator}", f"{entry.nodes:,}"
    for way, ports in (("input", graph.inputs), ("output", graph.outputs)):
        for port in ports:
            role = f", {port.role}" if port.role else ""
            yield "inputs and outputs", f"{prefix}{way} {port.name}", f"{port.dtype} {shape_text(port.shape)}{role}"


def _states(found: Inspection) -> Iterator[Fact]:
    cache = found.cache
    if cache is None:
        return
    yield "states", "cache", human_bytes(cache.size_bytes)
    yield "states", "cache layout", cache.layout
    yield "states", "bytes per token", f"{cache.bytes_per_token:,}"
    for state in cache.states:
        yield "states", f"{state.past} -> {state.present}", f"{state.dtype} {state_text(state)}"


def _weights(found: Inspection) -> Iterator[Fact]:
    yield "weights", "total", human_bytes(found.weights.size_bytes)
    for kind in found.weights.kinds:
        yield "weights", kind.dtype, f"{plural(kind.tensors, 'tensor')}, {human_bytes(kind.size_bytes)}"
    ways: dict[str, dict[str, None]] = {}
    for module in found.modules:
        ways.setdefault(module.module or "(no module)", {})[storage_text(module)] = None
    for name, kept in ways.items():
        yield "modules", name, " + ".join(sorted(kept))


def _companions(found: Inspection) -> Iterator[Fact]:
    made = found.provenance
    yield "provenance", "checkpoint", made.checkpoint
    yield "provenance", "dtype of the checkpoint", made.dtype
    yield "provenance", "for", made.target
    yield "provenance", "verified", None if made.verification is None else made.verification.partition(":")[0]
    yield "provenance", "quality", made.quality
    for name, version in made.toolchain.items():
        yield "provenance", name, version
    for file in made.source_files:
        yield "provenance", f"checkpoint file {file.name}", file
    for adapter in found.adapters:
        yield "adapters", adapter.name, adapter_text(adapter)
        for source in adapter.source:
            yield "adapters", f"{adapter.name}: {source.name}", FileFacts.copy_of(source)
    for file in found.files:
        yield "files", file.name, file
    tokenizer, licence = found.tokenizer, found.licence
    yield "tokenizer and licence", "tokenizer", f"{tokenizer.kind} {tokenizer.model or ''}".strip()
    yield "tokenizer and licence", "vocabulary", None if tokenizer.vocabulary is None else f"{tokenizer.vocabulary:,}"
    yield "tokenizer and licence", "chat template", "yes" if tokenizer.chat_template else "no"
    for name, token in tokenizer.special.items():
        yield "tokenizer and licence", name, token
    yield "tokenizer and licence", "licence", licence.name


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
