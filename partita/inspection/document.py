"""Texts and document of the contents of a package or folder, for every view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.inspection.records import (
    CacheFacts,
    GraphFacts,
    Inspection,
    ModulePrecision,
    Size,
)
from partita.observations.grouping import grouped
from partita.observations.records import remedy_of
from partita.observations.text_format import families, human_bytes, listing, name_some, plural, tally
from partita.package.contract import State
from partita.package.folder import AdapterRecord
from partita.package.records import ForeignRecord
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
    table_of,
)

OPERATORS = 20
"""Maximum operators of a domain in a line; --json has all."""
FILE_FIELDS = ("name", "size_bytes", "sha256")
ROWS = 40
"""Maximum rows of a table."""


def document(found: Inspection) -> Document:
    """Every section that is not empty."""
    licence = [("licence", found.licence.name or "unknown"), *fields_of(found.licence, "name", prefix="licence ")]
    companions = (pairs("Tokenizer", fields_of(found.tokenizer, "files")), pairs("Licence", licence))
    weights = table_of("By type", found.weights.kinds, "dtype", "tensors", "elements", "size_bytes")
    files: list[Block] = [table_of("Files", found.files, *FILE_FIELDS, most=ROWS)]
    if found.kind == "package" and any(file.sha256 for file in found.files):
        files.append(Line("hashes from the manifest; partita verify checks them", tone="quiet"))
    origin = table_of("Files of the checkpoint", found.provenance.source_files, *FILE_FIELDS, most=ROWS, obvious=False)
    sections = (
        Section("model", "Model", (pairs("Model", fields_of(found.model)),)),
        *(_graph(graph) for graph in found.graphs),
        Section("contract", "Contract", _contract(found)),
        Section("foreign", "Detected layout", _foreign(found.foreign) if found.foreign else ()),
        Section("cache", "Cache", _cache(found.cache) if found.cache and found.cache.states else ()),
        Section("weights", "Weights", (weights,), human_bytes(found.weights.size_bytes)),
        Section("modules", "Precision by module", (_modules(found.modules),)),
        Section("provenance", "Provenance", (pairs("Provenance", fields_of(found.provenance)), origin)),
        Section("adapters", "Adapters", (pairs("Adapters", _adapters(found)),)),
        Section("files", "Files", tuple(files)),
        Section("companions", "Tokenizer and licence", companions),
    )
    return Document(
        kind=f"Contents of {'an' if found.kind.startswith('onnx') else 'a'} {found.kind}",
        name=found.path,
        headline=(summary(found),),
        opening=tuple(_findings(found)),
        sections=sections,
        created=found.provenance.created or "",
        version=found.partita_version,
    )


VIEWS = Views(document)


def _findings(found: Inspection) -> Iterator[Line]:
    """Problems, with remedies."""
    for finding in found.findings:
        yield Line(finding.problem, tone="bad")
        yield Line(str(remedy_of(finding.remedies) or ""), "remedy")


def _graph(graph: GraphFacts) -> Section:
    """Operators, operator sets, inputs and outputs of one file."""
    rows = fields_of(graph, "file", "metadata", "operators")
    for domain, names in grouped(graph.operators, lambda name: name.rpartition(":")[0]).items():
        counts = {name.rpartition(":")[2]: graph.operators[name] for name in names}
        rows.append((f"of {domain_name(domain)}", tally(counts, OPERATORS)))
    ports = [
        (f"{arrow}{port.name}", port.role or "-", port.dtype or "-", shape_text(port.shape))
        for arrow, ports in (("", graph.inputs), ("-> ", graph.outputs))
        for port in ports
    ]
    heads = ("input or output", "role", "type", "shape")
    shown = table("Inputs and outputs", heads, ports, obvious=True, most=ROWS)
    facts = pairs("Graph", [*rows, *graph.metadata.items()])
    return Section(f"graph-{graph.file}", f"Graph {graph.file}", (facts, shown))


def _contract(found: Inspection) -> tuple[Block, ...]:
    """Run-time properties; a package without a manifest has a finding instead."""
    missing = found.contract is None and found.kind.startswith("onnx")
    none = Line("none: no manifest, and the layout could not be inferred" if missing else "")
    return pairs("Contract", fields_of(found.contract)), none


def _foreign(foreign: ForeignRecord) -> tuple[Block, ...]:
    """The detected layout of a foreign folder."""
    ports = table_of("Ports", foreign.ports, "name", "meaning", "source", most=ROWS)
    fold = Group(f"meaning of {plural(len(foreign.ports), 'port')} and its source", (ports,), folded=True)
    notes = (Line(note, "note") for note in foreign.notes)
    return (pairs("Layout", fields_of(foreign, "notes")), *([fold] if ports.rows else []), *notes)


def _cache(cache: CacheFacts) -> tuple[Block, ...]:
    """States; equal states share a row."""
    alike = grouped(cache.states, lambda state: (state.kind, state.dtype, state_text(state)))
    rows = [(kind, f"{len(states)}", dtype, shape) for (kind, dtype, shape), states in alike.items()]
    total = pairs("Cache", fields_of(cache))
    return (total, table("States", ("state", Column("layers"), "type", "shape"), rows, obvious=True))


def _modules(modules: Sequence[ModulePrecision]) -> Table:
    """Modules with equal weight formats in a row; names that differ only in numbers are merged."""
    rows = []
    for how, alike in grouped(modules, storage_text).items():
        named = {module.module: module for module in alike}
        for family, names in families(named).items():
            members = [named[name] for name in names]
            shared = dict.fromkeys(name for member in members for name in member.shared_with if name not in names)
            also = f" (also {name_some(list(families(shared)), 3)})" if shared else ""
            parameters, size = (sum(getattr(each, field) for each in members) for field in ("parameters", "size_bytes"))
            name = f"{family or '(no module)'}{also}"
            row: dict[str, object] = {"module": name, "stored_as": how, "modules": len(members)}
            rows.append(row | {"weights": parameters, "bytes": size})
    return table_of("Precision by module", rows, most=ROWS)


def _adapters(found: Inspection) -> Iterator[tuple[str, str]]:
    """Merged and separate adapters."""
    yield from ((adapter.name, adapter_text(adapter)) for adapter in found.adapters)
    by_row = found.contract is not None and found.contract.adapters_by_row
    if any(not adapter.merged for adapter in found.adapters):
        yield "rows of a batch", "may use different adapters" if by_row else "share one adapter"


MAIN = "ai.onnx"


def domain_name(domain: str) -> str:
    """Name of an operator domain; the empty domain is ai.onnx."""
    return domain or MAIN


def shape_text(shape: Sequence[Size] | None) -> str:
    """`[1, S, 8]`, with `?` for unknown sizes; `-` if the rank is unknown."""
    return "-" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def state_text(state: State) -> str:
    """Shape of a state, and how it grows."""
    grows = "" if state.growing_axis is None else f", grows along axis {state.growing_axis}"
    window = "" if state.window is None else f", {'rolling ' if state.rolling else ''}window {state.window:,}"
    return f"{shape_text(state.shape)}{grows}{window}"


def storage_text(module: ModulePrecision) -> str:
    """`int4, MatMulNBits, blocks of 32, zero points`, or the element type."""
    blocks = f"blocks of {module.block_size}" if module.operator and module.block_size else ""
    points = "zero points" if module.zero_points else ""
    computed = f"computed in {module.compute_dtype}" if module.compute_dtype else ""
    return ", ".join(filter(None, (module.precision, module.operator, blocks, points, computed)))


KINDS = {
    "package": "a package",
    "model package": "a model package of ONNX Runtime",
    "onnx folder": "a folder of ONNX files",
    "onnx file": "an ONNX file",
}


def summary(found: Inspection) -> str:
    """One-sentence summary."""
    model = found.model
    about = ", ".join(filter(None, (model.architecture or model.model_type, model.precision, model.attention)))
    own = model.layout in (None, "partita", "onnx")
    what = f"{KINDS[found.kind] if own else f'a folder of {model.layout}'}{f' of {about}' if about else ''}"
    nodes = listing(f"{graph.nodes + graph.subgraph_nodes:,}" for graph in found.graphs)
    graphs = f"{plural(len(found.graphs), 'graph')} of {nodes} nodes" if found.graphs else "no readable graph"
    parts = [f"{found.path}: {what}: {graphs}", f"weights {human_bytes(found.weights.size_bytes)}"]
    parts += [f"cache {human_bytes(found.cache.size_bytes)}"] if found.cache and found.cache.states else []
    parts += [plural(len(found.findings), "finding")] if found.findings else []
    return "; ".join([*parts, *([f"omitted: {model.omitted}"] if model.omitted else [])])


def adapter_text(adapter: AdapterRecord) -> str:
    """`LoRA of rank 4 and 8 for 14 modules, trained on NAME; separate, named NAME`."""
    kind = {"lora": "LoRA", "dora": "DoRA"}.get(adapter.kind or "", adapter.kind or "adapter")
    ranks = f" of rank {listing(map(str, adapter.ranks))}" if adapter.ranks else ""
    modules = "" if adapter.modules is None else f" for {plural(adapter.modules, 'module')}"
    whole = f", {plural(len(adapter.replaced_parameters), 'parameter')} replaced" if adapter.replaced_parameters else ""
    trained = f", trained on {adapter.base_model}" if adapter.base_model else ""
    where = "merged into the weights" if adapter.merged else f"separate, named {adapter.name}"
    return f"{kind}{ranks}{modules}{whole}{trained}; {where}"
