"""Texts and document of the contents of a package or folder, for every view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.inspection.records import (
    GraphFacts,
    Inspection,
    ModulePrecision,
    PortFacts,
    Size,
)
from partita.observations.records import remedy_of
from partita.observations.text_format import families, human_bytes, listing, name_some, plural, tally
from partita.package.contract import State
from partita.package.folder import AdapterRecord
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Document,
    Fold,
    Head,
    Line,
    Section,
    fields_of,
    numbers,
    pairs,
    table,
)

OPERATORS = 20
"""Maximum operators of a domain in a line; --json has all."""
ROWS = 40
"""Maximum rows of a table."""


def document(found: Inspection) -> Document:
    """Every section that is not empty."""
    sections = (
        _model(found),
        *(_graph(graph) for graph in found.graphs),
        _contract(found),
        _foreign(found),
        _cache(found),
        _weights(found),
        _modules(found.modules),
        _provenance(found),
        _adapters(found),
        _files(found),
        _companions(found),
    )
    return Document(
        kind=f"Contents of {'an' if found.kind.startswith('onnx') else 'a'} {found.kind}",
        name=found.path,
        headline=(summary(found),),
        opening=tuple(_findings(found)),
        sections=tuple(section for section in sections if section is not None),
        created=found.provenance.created or "",
        version=found.partita_version,
    )


VIEWS = Views(document)


def _findings(found: Inspection) -> Iterator[Line]:
    """Problems, with remedies."""
    for finding in found.findings:
        yield Line(finding.problem, tone="bad")
        remedy = remedy_of(finding.remedies)
        if remedy is not None:
            yield Line(str(remedy), "remedy")


def _model(found: Inspection) -> Section | None:
    shown = pairs("Model", fields_of(found.model))
    return Section("model", "Model", (shown,)) if shown.rows else None


def _graph(graph: GraphFacts) -> Section:
    """Operators, operator sets, inputs and outputs of one file."""
    opsets = ", ".join(f"{domain_name(domain)} {version}" for domain, version in sorted(graph.opsets.items()))
    rows = [*fields_of(graph, "file", "opsets", "metadata"), ("opsets", opsets)]
    for domain in dict.fromkeys(entry.domain for entry in graph.operators):
        counts = {entry.operator: entry.nodes for entry in graph.operators if entry.domain == domain}
        rows.append((f"of {domain_name(domain)}", tally(counts, OPERATORS)))
    rows += [(key, value) for key, value in graph.metadata.items()]
    heads = ("input or output", "role", "type", "shape")
    ports = [
        *(_port_row(port) for port in graph.inputs),
        *((f"-> {name}", *rest) for name, *rest in map(_port_row, graph.outputs)),
    ]
    blocks: tuple[Block, ...] = (pairs("Graph", rows),)
    if ports:
        blocks += (table("Inputs and outputs", heads, ports, obvious=True, most=ROWS, rest=_more),)
    return Section(f"graph-{graph.file}", f"Graph {graph.file}", blocks)


def _port_row(port: PortFacts) -> tuple[str, str, str, str]:
    return port.name, port.role or "-", port.dtype or "-", shape_text(port.shape)


def _more(shown: int) -> str:
    return f"the first {shown}; the JSON has all"


def _contract(found: Inspection) -> Section | None:
    contract = found.contract
    if contract is None:
        none = "none: no manifest, and the layout could not be inferred"
        return Section("contract", "Contract", (Line(none),)) if found.kind.startswith("onnx") else None
    return Section("contract", "Contract", (pairs("Contract", fields_of(contract)),))


def _foreign(found: Inspection) -> Section | None:
    """The detected layout of a foreign folder."""
    foreign = found.foreign
    if foreign is None:
        return None
    ports = [(port.name, port.meaning, port.source) for port in foreign.ports]
    blocks: list[Block] = [pairs("Layout", fields_of(foreign, "notes"))]
    if ports:
        heads = ("input or output", "meaning", "source")
        shown = table("Ports", heads, ports, obvious=True, most=ROWS, rest=_more)
        blocks.append(Fold(f"meaning of {plural(len(ports), 'port')} and its source", (shown,)))
    blocks += [Line(note, "note") for note in foreign.notes]
    return Section("foreign", "Detected layout", tuple(blocks))


def _cache(found: Inspection) -> Section | None:
    """States; equal states share a row."""
    cache = found.cache
    if cache is None or not cache.states:
        return None
    alike: dict[tuple[str, ...], list[int]] = {}
    for state in cache.states:
        alike.setdefault((state.kind, state.dtype, state_text(state)), []).append(state.layer)
    rows = [(kind, f"{len(layers)}", dtype, shape) for (kind, dtype, shape), layers in alike.items()]
    heads = ("state", Column("layers"), "type", "shape")
    parts = [f"{cache.bytes_per_token:,} bytes per token"] if cache.bytes_per_token else []
    parts += [f"{human_bytes(cache.fixed_bytes)} independent of the length"] if cache.fixed_bytes else []
    layout = "" if cache.layout == "fixed" else f"; layout: {cache.layout}"
    total = Line(f"{human_bytes(cache.size_bytes)} in total: {listing(parts)}{layout}", "cache")
    return Section("cache", "Cache", (total, table("States", heads, rows, obvious=True)))


def _weights(found: Inspection) -> Section | None:
    """Stored tensors by type."""
    weights = found.weights
    if not weights.kinds:
        return None
    rows = [
        (kind.dtype, f"{kind.tensors:,}", f"{kind.elements:,}", human_bytes(kind.size_bytes)) for kind in weights.kinds
    ]
    heads: tuple[Head, ...] = ("type", *numbers("tensors", "elements", "bytes"))
    return Section(
        "weights", "Weights", (table("By type", heads, rows, obvious=True),), human_bytes(weights.size_bytes)
    )


def _modules(modules: Sequence[ModulePrecision]) -> Section | None:
    """Modules with equal weight formats in a row; names that differ only in numbers are merged."""
    if not modules:
        return None
    rows = []
    formats: dict[str, list[ModulePrecision]] = {}
    for module in modules:
        formats.setdefault(storage_text(module), []).append(module)
    for how, alike in formats.items():
        named = {module.module: module for module in alike}
        for family, names in families(named).items():
            members = [named[name] for name in names]
            shared = dict.fromkeys(name for member in members for name in member.shared_with if name not in names)
            also = f" (also {name_some(list(families(shared)), 3)})" if shared else ""
            rows.append(
                (
                    f"{family or '(no module)'}{also}",
                    how,
                    f"{len(members):,}",
                    f"{sum(member.parameters for member in members):,}",
                    human_bytes(sum(member.size_bytes for member in members)),
                )
            )
    heads: tuple[Head, ...] = ("module", "stored as", *numbers("modules", "weights", "bytes"))
    shown = table("Precision by module", heads, rows, obvious=True, most=ROWS, rest=_more)
    return Section("modules", "Precision by module", (shown,))


def _provenance(found: Inspection) -> Section | None:
    made = found.provenance
    shown = pairs("Provenance", fields_of(made))
    blocks: tuple[Block, ...] = (shown,) if shown.rows else ()
    if made.source_files:
        heads = ("file of the checkpoint", Column("bytes"), "SHA-256")
        listed = [(file.name, human_bytes(file.size_bytes), file.sha256 or "-") for file in made.source_files]
        blocks += (table("Files of the checkpoint", heads, listed, obvious=True, rest=_more),)
    return Section("provenance", "Provenance", blocks) if blocks else None


def _adapters(found: Inspection) -> Section | None:
    """Merged and separate adapters."""
    if not found.adapters:
        return None
    rows = [(adapter.name, adapter_text(adapter)) for adapter in found.adapters]
    by_row = found.contract is not None and found.contract.adapters_by_row
    if any(not adapter.merged for adapter in found.adapters):
        rows.append(("rows of a batch", "may use different adapters" if by_row else "share one adapter"))
    return Section("adapters", "Adapters", (pairs("Adapters", rows),))


def _files(found: Inspection) -> Section | None:
    """Files of the folder."""
    if not found.files:
        return None
    rows = [
        (file.name, "missing" if file.size_bytes is None else human_bytes(file.size_bytes), file.sha256 or "-")
        for file in found.files
    ]
    heads = ("file", Column("bytes"), "SHA-256")
    shown: tuple[Block, ...] = (table("Files", heads, rows, obvious=True, most=ROWS, rest=_more),)
    if found.kind == "package" and any(file.sha256 for file in found.files):
        shown += (Line("hashes from the manifest; partita verify checks them", tone="quiet"),)
    return Section("files", "Files", shown)


def _companions(found: Inspection) -> Section:
    """Tokenizer and licence."""
    tokenizer = pairs("Tokenizer", fields_of(found.tokenizer, "files"))
    licence = [("licence", found.licence.name or "unknown"), *fields_of(found.licence, "name", prefix="licence ")]
    return Section("companions", "Tokenizer and licence", (tokenizer, pairs("Licence", licence)))


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
    parts = [module.precision]
    if module.operator:
        parts.append(module.operator)
    if module.operator and module.block_size:
        parts.append(f"blocks of {module.block_size}")
    if module.zero_points:
        parts.append("zero points")
    if module.compute_dtype:
        parts.append(f"computed in {module.compute_dtype}")
    return ", ".join(parts)


def summary(found: Inspection) -> str:
    """One-sentence summary."""
    model = found.model
    about = [text for text in (model.architecture or model.model_type, model.precision, model.attention) if text]
    what = {
        "package": "a package",
        "model package": "a model package of ONNX Runtime",
        "onnx folder": "a folder of ONNX files",
        "onnx file": "an ONNX file",
    }[found.kind]
    if model.layout not in (None, "partita", "onnx"):
        what = f"a folder of {model.layout}"
    nodes = listing(f"{graph.nodes + graph.subgraph_nodes:,}" for graph in found.graphs)
    graphs = f"{plural(len(found.graphs), 'graph')} of {nodes} nodes" if found.graphs else "no readable graph"
    cache = ""
    if found.cache is not None and found.cache.states:
        cache = f"; cache {human_bytes(found.cache.size_bytes)}"
    wrong = f"; {plural(len(found.findings), 'finding')}" if found.findings else ""
    size = human_bytes(found.weights.size_bytes)
    named = f" of {', '.join(about)}" if about else ""
    lacks = f"; omitted: {model.omitted}" if model.omitted else ""
    return f"{found.path}: {what}{named}: {graphs}; weights {size}{cache}{wrong}{lacks}"


def adapter_text(adapter: AdapterRecord) -> str:
    """`LoRA of rank 4 and 8 for 14 modules, trained on NAME; separate, named NAME`."""
    kind = {"lora": "LoRA", "dora": "DoRA"}.get(adapter.kind or "", adapter.kind or "adapter")
    ranks = f" of rank {listing(map(str, adapter.ranks))}" if adapter.ranks else ""
    modules = "" if adapter.modules is None else f" for {plural(adapter.modules, 'module')}"
    whole = f", {plural(len(adapter.replaced_parameters), 'parameter')} replaced" if adapter.replaced_parameters else ""
    trained = f", trained on {adapter.base_model}" if adapter.base_model else ""
    where = "merged into the weights" if adapter.merged else f"separate, named {adapter.name}"
    return f"{kind}{ranks}{modules}{whole}{trained}; {where}"
