"""Open a folder as a manifest: that of a package, or one inferred from graphs and configuration files."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign import GraphFacts, read_graph
from partita.foreign.evidence import CONFIG, EMPTY_CONTRACT, Evidence, Written, read_evidence, read_written
from partita.foreign.inference import CORRECT, LONGEST, Inference
from partita.foreign.layouts import (
    GENAI_CONFIG,
    SUBFOLDER,
    Candidate,
    candidates,
    choose,
    onnx_files,
    refuse_other_models,
)
from partita.foreign.ports import adapter_files, adapter_inputs
from partita.options.fields import group, path_of
from partita.options.groups import ForeignFolder
from partita.package.contract import Contract, state_bytes
from partita.package.folder import (
    GET_AGAIN,
    MANIFEST,
    AdapterRecord,
    FileRecord,
    Graph,
    Manifest,
    Source,
    TokenizerKind,
    check_folder,
    is_of_others,
    read_manifest,
    unreadable,
)
from partita.package.records import ForeignRecord, Verification

NO_ANSWER = "not exported by Partita, so it has no known answer"
TOKENIZERS: Mapping[str, TokenizerKind] = {
    "tokenizer.json": "tokenizers",
    "tokenizer_config.json": "transformers",
    "tokenizer.model": "transformers",
    "vocab.json": "transformers",
}
"""Tokenizer file -> library; the first existing file counts."""
ATTENTION = {
    "com.microsoft.GroupQueryAttention": "gqa",
    "com.microsoft.MultiHeadAttention": "mha",
    "com.microsoft.SparseAttention": "sparse",
    "com.microsoft.Attention": "contrib",
    "Attention": "onnx",
}
"""Operator -> name of the attention; primitives without one of them."""
TABLE_PRODUCT = "com.microsoft.MatMulBnb4"
WHOLE = frozenset({"MatMulInteger", "com.microsoft.DynamicQuantizeMatMul", "QLinearMatMul"})
"""Operators on weights quantised to 8-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Choice(ForeignFolder):
    """The user's settings for a foreign folder."""

    contract: Path | None = None

    @classmethod
    def of(cls, options: ForeignFolder) -> Self:
        """The settings in a command's options."""
        return replace(group(options, cls), contract=path_of(options.contract))

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings that are set."""
        return tuple(name for name, value in asdict(self).items() if value is not None)

    def refuse_for_file(self) -> None:
        """Raise UsageError for a setting, because the model is a file."""
        if self.setting_names:
            raise UsageError(f"`{self.setting_names[0]}` is only for foreign folders; omit it for a file")


NO_CHOICE = Choice()


def is_foreign(folder: Path) -> bool:
    """Whether a folder has ONNX files and no manifest of a package. Raises PackageError when it is unreadable."""
    try:
        check_folder(folder)
        if not folder.is_dir() or ((folder / MANIFEST).is_file() and not is_of_others(folder / MANIFEST)):
            return False
        return (folder / GENAI_CONFIG).is_file() or bool(onnx_files(_names(folder)))
    except PermissionError as error:
        raise unreadable(folder) from error


def open_folder(folder: Path, choice: Choice = NO_CHOICE) -> Manifest:
    """The manifest of a package, or an inferred one. Raises PackageError, UsageError for other settings."""
    if not is_foreign(folder):
        if choice.setting_names and (folder / MANIFEST).is_file():
            raise UsageError(
                f"`{choice.setting_names[0]}` is only for folders that Partita did not write; {folder} is a package; "
                "omit it"
            )
        return read_manifest(folder)
    written = EMPTY_CONTRACT if choice.contract is None else read_written(choice.contract)
    if choice.max_length is not None and not 1 <= choice.max_length <= LONGEST:
        raise UsageError(f"`max_length` is {choice.max_length}; it must be between 1 and {LONGEST:,}")
    evidence = read_evidence(folder)
    found = _candidates(folder, evidence, written)
    chosen = choose(folder, found, choice.variant)
    graphs = [(read_graph(folder, file), phase) for file, phase in chosen.files]
    inference = Inference(str(folder), graphs, evidence, written, choice.max_length)
    try:
        return _manifest(folder, inference, inference.run(), chosen, found)
    except ValidationError as error:  # invalid numbers and types in the graph or its configuration
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"]).rstrip(".")
        remedy = GET_AGAIN if choice.contract is None else CORRECT
        raise PackageError(
            ": ".join(filter(None, (str(folder), where, str(first.get("ctx", {}).get("error", first["msg"]))))),
            remedy=remedy,
        ) from error


def _names(folder: Path) -> list[str]:
    """Files of a folder and of its subfolder onnx/, relative to it."""
    return [
        path.relative_to(folder).as_posix()
        for home in (folder, folder / SUBFOLDER)
        if home.is_dir()
        for path in home.iterdir()
        if path.is_file()
    ]


def _candidates(folder: Path, evidence: Evidence, written: Written) -> tuple[Candidate, ...]:
    """The models of a folder. Raises PackageError for models other than decoders."""
    if written.files:
        files = sorted(written.files, key=lambda entry: entry.phase == "decode")
        return (Candidate("", tuple((entry.file, entry.phase) for entry in files)),)
    if evidence.file:
        return (Candidate("", ((evidence.file, "any"),)),)
    models = onnx_files(_names(folder))
    refuse_other_models(folder, models)
    found = candidates(models)
    if not found:
        raise PackageError(f"{folder}: {GENAI_CONFIG} names no ONNX file, and the folder contains none")
    return found


def _manifest(
    folder: Path, inference: Inference, contract: Contract, chosen: Candidate, found: Sequence[Candidate]
) -> Manifest:
    """Build the manifest."""
    graphs, evidence = [graph for graph, _ in inference.graphs], inference.evidence
    main = graphs[-1]
    adapters = adapter_files(folder, main)
    switched = {graph.file: adapter_inputs(graph, files=bool(adapters)) for graph in graphs}
    if not any(switched.values()):
        adapters = ()
    names = [name for graph in graphs for name in (graph.file, *graph.data_files)]
    statuses = {name: (folder / name).stat() for name in (*names, *adapters)}
    written = max(status.st_mtime for status in statuses.values())
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
            opsets=dict(main.model.opsets),
            attention=next((name for operator, name in ATTENTION.items() if operator in main.operators), "primitives"),
            precision=_precision(main),
            cache_bytes=state_bytes(contract.states),
        ),
        files=tuple(FileRecord(name=name, size_bytes=status.st_size, sha256="") for name, status in statuses.items()),
        adapters=tuple(AdapterRecord(name=Path(file).stem, merged=False, file=file) for file in adapters),
        tokenizer=next((kind for name, kind in TOKENIZERS.items() if (folder / name).is_file()), "none"),
        toolchain={},
        verification=Verification(status="unverified", detail=NO_ANSWER),
        foreign=ForeignRecord(
            layout=_layout(folder, chosen),
            variant=chosen.variant,
            candidates=tuple(each.name for each in found if each is not chosen),
            producer=" ".join(filter(None, (main.model.proto.producer_name, main.model.proto.producer_version))),
            adapters=adapters,
            adapter_inputs=len({port.name for ports in switched.values() for port in ports}),
            ports=tuple(inference.sources.values()),
            notes=tuple(inference.notes),
        ),
    )


def _layout(folder: Path, chosen: Candidate) -> str:
    """The layout of the folder."""
    if (folder / GENAI_CONFIG).is_file():
        return "onnxruntime-genai"
    if not (folder / CONFIG).is_file():
        return "onnx"
    inside = any(file.startswith(f"{SUBFOLDER}/") for file, _ in chosen.files)
    return "transformers.js" if inside else "optimum"


def _precision(graph: GraphFacts) -> str:
    """The precision of most weights, by the names of an export."""
    if graph.product_bits:
        return f"int{max(graph.product_bits, key=lambda bits: (graph.product_bits[bits], -bits))}"
    if TABLE_PRODUCT in graph.operators:
        return "int4"
    stored = graph.weights
    floats = max((count for name, count in stored.items() if "float" in name), default=0)
    for name in ("int4", "int8"):
        if stored.get(name, 0) + stored.get(f"u{name}", 0) > floats:
            return name
    if not WHOLE.isdisjoint(graph.operators):
        return "int8"
    return {"float16": "fp16", "bfloat16": "bf16"}.get(_most_floats(graph), "fp32")


def _most_floats(graph: GraphFacts) -> str:
    """The float type of most weights."""
    return max(("float32", "float16", "bfloat16"), key=lambda name: graph.weights.get(name, 0))
