"""Infer the manifest of a foreign folder from its graphs and configuration files."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign import GraphFacts, read_graph
from partita.foreign.evidence import CONFIG, EMPTY_CONTRACT, Evidence, Written, read_evidence, read_json, read_written
from partita.foreign.inference import Inference, InferredContract
from partita.foreign.layouts import (
    GENAI_CONFIG,
    SUBFOLDER,
    Candidate,
    Phase,
    candidates,
    choose,
    onnx_files,
    refuse_other_models,
)
from partita.foreign.ports import adapter_files, adapter_inputs, adapter_records
from partita.foreign.shapes import LONGEST
from partita.observations.text_format import listing
from partita.package.contract import state_bytes
from partita.package.folder import GET_AGAIN, FileRecord, Graph, Manifest, Source, TokenizerKind
from partita.package.records import ForeignRecord, Verification

NO_ANSWER = "not exported by Partita, so it has no known answer"
TOKENIZERS: Mapping[str, TokenizerKind] = {
    "tokenizer.json": "tokenizers",
    "tokenizer_config.json": "transformers",
    "tokenizer.model": "transformers",
    "vocab.json": "transformers",
}
"""Tokenizer file -> library; the first existing file counts."""
TABLE_PRODUCT = "com.microsoft.MatMulBnb4"
WHOLE = ("MatMulInteger", "com.microsoft.DynamicQuantizeMatMul", "QLinearMatMul")
"""Operators on quantised weights: 4-bit table codes, 8-bit integers."""


def infer_manifest(
    folder: Path, names: Sequence[str], variant: str | None, contract: Path | None, max_length: int | None
) -> Manifest:
    """The manifest of a folder with files `names`; the others as in `Choice`. Raises as `open_folder`."""
    written = EMPTY_CONTRACT if contract is None else read_written(contract)
    if max_length is not None and not 1 <= max_length <= LONGEST:
        raise UsageError(f"`max_length` is {max_length}; it must be between 1 and {LONGEST:,}")
    evidence = read_evidence(folder)
    found = _candidates(folder, names, evidence, written)
    chosen = choose(folder, found, variant)
    graphs = [(read_graph(folder, file), phase) for file, phase in chosen.files]
    try:
        inferred = Inference(str(folder), graphs, evidence, written, max_length).run()
        return _manifest(folder, evidence, [graph for graph, _ in graphs], inferred, chosen, found)
    except ValidationError as error:  # invalid numbers and types in the graph or its configuration
        first = error.errors()[0]
        raise PackageError(f"{folder}: {'.'.join(map(str, first['loc']))}: {first['msg']}", remedy=GET_AGAIN) from error


def _candidates(folder: Path, names: Sequence[str], evidence: Evidence, written: Written) -> tuple[Candidate, ...]:
    """The models of a folder. Raises PackageError for models other than decoders."""
    if written.files:
        files: tuple[tuple[str, Phase], ...] = tuple((entry.file, entry.phase) for entry in written.files)
        if sorted(phase for _, phase in files) not in (["any"], ["decode", "prefill"]):
            raise UsageError(
                f"`contract`: its files are {listing(f'{file} ({phase})' for file, phase in files)}; "
                "specify one for all phases, or one for prefill and one for decode"
            )
        files = tuple(sorted(files, key=lambda entry: entry[1] == "decode"))
        return (Candidate("", files),)
    if evidence.file:
        return (Candidate("", ((evidence.file, "any"),)),)
    models = onnx_files(names)
    refuse_other_models(folder, models)
    found = candidates(models)
    if not found:
        raise PackageError(f"{folder}: {GENAI_CONFIG} names no ONNX file, and the folder contains none")
    return found


def _manifest(
    folder: Path,
    evidence: Evidence,
    graphs: list[GraphFacts],
    inferred: InferredContract,
    chosen: Candidate,
    found: tuple[Candidate, ...],
) -> Manifest:
    """Build the manifest."""
    contract, main = inferred.contract, graphs[-1]
    precision = precision_of(main)
    homes = dict.fromkeys(str(PurePosixPath(graph.file).parent) for graph in graphs)
    adapters = adapter_files(folder, tuple(homes))
    switched = {graph.file: adapter_inputs(graph, files=bool(adapters)) for graph in graphs}
    if not any(switched.values()):
        adapters = ()
    names = dict.fromkeys((*(name for graph in graphs for name in (graph.file, *graph.data_files)), *adapters))
    files = tuple(FileRecord(name=name, size_bytes=(folder / name).stat().st_size, sha256="") for name in names)
    written = max((folder / name).stat().st_mtime for name in names)
    return Manifest(
        created=datetime.datetime.fromtimestamp(written, datetime.UTC).isoformat(timespec="seconds"),
        source=Source(
            checkpoint="",
            model_type=evidence.model_type or "unknown",
            architecture=evidence.architecture,
            dtype=_most_floats(main),
            parameters=sum(main.weights.values()),
            files=(),
        ),
        graph=Graph(
            **{name: getattr(contract, name) for name in type(contract).model_fields if name != "files"},
            files=tuple(file.model_copy(update={"adapter_inputs": switched[file.file]}) for file in contract.files),
            opsets=dict(main.opsets),
            attention=attention_of(main),
            precision=precision,
            cache_bytes=state_bytes(contract.states),
        ),
        files=files,
        adapters=adapter_records(folder, adapters),
        tokenizer=next((kind for name, kind in TOKENIZERS.items() if (folder / name).is_file()), "none"),
        toolchain={},
        verification=Verification(status="unverified", detail=NO_ANSWER),
        foreign=ForeignRecord(
            layout=_layout(folder, chosen),
            variant=chosen.variant,
            candidates=tuple(each.name for each in found if each is not chosen),
            producer=main.producer,
            adapters=adapters,
            adapter_inputs=len({port.name for ports in switched.values() for port in ports}),
            ports=inferred.ports,
            notes=inferred.notes,
        ),
    )


def _layout(folder: Path, chosen: Candidate) -> str:
    """The layout of the folder."""
    if (folder / GENAI_CONFIG).is_file():
        return "onnxruntime-genai"
    inside = any(file.startswith(f"{SUBFOLDER}/") for file, _ in chosen.files)
    config = folder / CONFIG
    if not config.is_file():
        return "onnx"
    return "transformers.js" if inside or "transformers.js_config" in read_json(config) else "optimum"


def precision_of(graph: GraphFacts) -> str:
    """The precision of most weights, by the names of an export."""
    stored = graph.weights
    if graph.quantised_products:
        return f"int{max(graph.quantised_products, key=lambda bits: (graph.quantised_products[bits], -bits))}"
    if TABLE_PRODUCT in graph.operators:
        return "int4"
    packed = {"int4": ("int4", "uint4"), "int8": ("int8", "uint8")}
    floats = max((count for name, count in stored.items() if "float" in name), default=0)
    for name, dtypes in packed.items():
        if sum(stored.get(dtype, 0) for dtype in dtypes) > floats:
            return name
    if any(operator in graph.operators for operator in WHOLE):
        return "int8"
    return {"float16": "fp16", "bfloat16": "bf16"}.get(_most_floats(graph), "fp32")


def _most_floats(graph: GraphFacts) -> str:
    """The float type of most weights."""
    floats = {name: count for name, count in graph.weights.items() if name in ("float32", "float16", "bfloat16")}
    return max(floats, key=lambda name: floats[name], default="float32")


def attention_of(graph: GraphFacts) -> str:
    """The name of the attention: its operator, or primitives."""
    operators = {
        "com.microsoft.GroupQueryAttention": "gqa",
        "com.microsoft.MultiHeadAttention": "mha",
        "com.microsoft.SparseAttention": "sparse",
        "com.microsoft.Attention": "contrib",
        "Attention": "onnx",
    }
    return next((name for operator, name in operators.items() if operator in graph.operators), "primitives")
