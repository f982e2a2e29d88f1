"""Texts for facts of a package, shared by the documents of one package and of a difference."""

from __future__ import annotations

from collections.abc import Sequence

from partita.inspection.records import AdapterFacts, Inspection, ModulePrecision, Size
from partita.observations.text_format import human_bytes, listing, plural

MAIN = "ai.onnx"


def domain_name(domain: str) -> str:
    """Name of an operator domain; the empty domain is ai.onnx."""
    return domain or MAIN


def shape_text(shape: Sequence[Size] | None) -> str:
    """`[1, S, 8]`, with `?` for unknown sizes; `-` if the rank is unknown."""
    return "-" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


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
    what = {"package": "a package", "onnx folder": "a folder of ONNX files", "onnx file": "an ONNX file"}[found.kind]
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


def adapter_text(adapter: AdapterFacts) -> str:
    """`LoRA of rank 4 and 8 for 14 modules, trained on NAME; separate, named NAME`."""
    kind = {"lora": "LoRA", "dora": "DoRA"}.get(adapter.kind or "", adapter.kind or "adapter")
    ranks = f" of rank {listing(map(str, adapter.ranks))}" if adapter.ranks else ""
    modules = "" if adapter.modules is None else f" for {plural(adapter.modules, 'module')}"
    whole = f", {plural(len(adapter.replaced_parameters), 'parameter')} replaced" if adapter.replaced_parameters else ""
    trained = f", trained on {adapter.base_model}" if adapter.base_model else ""
    where = "merged into the weights" if adapter.merged else f"separate, named {adapter.name}"
    return f"{kind}{ranks}{modules}{whole}{trained}; {where}"
