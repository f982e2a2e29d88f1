"""A folder as a manifest, whoever wrote it: the one way by which every verb opens what it was given."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign.evidence import CONFIG, Evidence, read_evidence, read_json
from partita.foreign.facts import GraphFacts
from partita.foreign.inference import Inference, Inferred
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
from partita.foreign.lora import adapter_files, adapter_inputs, adapter_records
from partita.foreign.reading import read_graph
from partita.foreign.shapes import LONGEST, cache_bytes
from partita.foreign.written import NOTHING, Written, read_written
from partita.observations.text_format import listing
from partita.options.groups import ForeignFolder
from partita.package.folder import (
    GET_AGAIN,
    MANIFEST,
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

NO_ANSWER = "Partita did not write it, so it has no known answer"
TOKENIZERS: Mapping[str, TokenizerKind] = {
    "tokenizer.json": "tokenizers",
    "tokenizer_config.json": "transformers",
    "tokenizer.model": "transformers",
    "vocab.json": "transformers",
}
"""What reads the tokenizer, by the first of these files that is there."""
TABLED = "com.microsoft.MatMulBnb4"
WHOLE = ("MatMulInteger", "com.microsoft.DynamicQuantizeMatMul", "QLinearMatMul")
"""Operators on packed weights: 4 bits that choose from a table, integers of 8 bits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user says of a folder that Partita did not write."""

    variant: str | None = None
    """Which of several files of one model: q4, fp16, or the name of a file."""
    contract: Path | None = None
    """A file that says what cannot be inferred."""
    max_length: int | None = None
    """N: the most tokens of a text, which is also how long buffers of a cache of fixed length are."""

    @classmethod
    def of(cls, options: ForeignFolder) -> Self:
        """The choice of a verb's options."""
        contract = None if options.contract is None else Path(options.contract)
        return cls(options.variant, contract, options.max_length)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what was said."""
        return tuple(name for name, value in asdict(self).items() if value is not None)

    @property
    def reads(self) -> tuple[Path, ...]:
        """Files that are read because of it, beside those of the folder."""
        return () if self.contract is None else (self.contract,)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for a child process."""
        return {**asdict(self), "contract": None if self.contract is None else str(self.contract.resolve())}


AS_IT_IS = Choice()


def choice_of(given: Mapping[str, Any]) -> Choice:
    """The choice that `to_json` wrote."""
    contract = given["contract"]
    return Choice(**{**given, "contract": None if contract is None else Path(contract)})


def is_foreign(folder: Path) -> bool:
    """Whether a folder has ONNX files and no manifest of a package. Raises PackageError when it may not be read."""
    try:
        check_folder(folder)
        if not folder.is_dir() or ((folder / MANIFEST).is_file() and not is_of_others(folder / MANIFEST)):
            return False
        return (folder / GENAI_CONFIG).is_file() or bool(onnx_files(_names(folder)))
    except PermissionError as error:
        raise unreadable(folder) from error


def open_folder(folder: Path, choice: Choice = AS_IT_IS) -> Manifest:
    """The manifest of a package, or one that is inferred for a folder of another exporter, and lies nowhere on disk.

    Raises PackageError for what is neither, or cannot be understood; UsageError for a choice that the folder does not
    have.
    """
    if not is_foreign(folder):
        if choice.given and (folder / MANIFEST).is_file():
            raise UsageError(f"`{choice.given[0]}` is for folders that Partita did not write; {folder} is a package")
        return read_manifest(folder)
    written = NOTHING if choice.contract is None else read_written(choice.contract)
    if choice.max_length is not None and not 1 <= choice.max_length <= LONGEST:
        raise UsageError(f"`max_length` is {choice.max_length}; it must be between 1 and {LONGEST:,}")
    evidence = read_evidence(folder)
    found = _candidates(folder, evidence, written)
    chosen = choose(folder, found, choice.variant)
    graphs = [(read_graph(folder, file, evidence.max_length), phase) for file, phase in chosen.files]
    try:
        inferred = Inference(str(folder), graphs, evidence, written, choice.max_length).run()
        return _manifest(folder, evidence, [graph for graph, _ in graphs], inferred, chosen, found)
    except ValidationError as error:  # numbers and types of the graph or its configuration
        first = error.errors()[0]
        raise PackageError(f"{folder}: {'.'.join(map(str, first['loc']))}: {first['msg']}", remedy=GET_AGAIN) from error


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
    """The models of a folder. Raises PackageError for folders of other models than decoders."""
    if written.files:
        files: tuple[tuple[str, Phase], ...] = tuple((entry.file, entry.phase) for entry in written.files)
        if sorted(phase for _, phase in files) not in (["any"], ["decode", "prefill"]):
            raise UsageError(
                f"`contract`: its files are {listing(f'{file} ({phase})' for file, phase in files)}; name "
                "one for any phase, or one for prefill and one for decode"
            )
        files = tuple(sorted(files, key=lambda entry: entry[1] == "decode"))
        return (Candidate("", files),)
    if evidence.file:
        return (Candidate("", ((evidence.file, "any"),)),)
    names = onnx_files(_names(folder))
    refuse_other_models(folder, names)
    found = candidates(names)
    if not found:
        raise PackageError(f"{folder}: {GENAI_CONFIG} names no ONNX file, and none is there")
    return found


def _manifest(
    folder: Path,
    evidence: Evidence,
    graphs: list[GraphFacts],
    inferred: Inferred,
    chosen: Candidate,
    found: tuple[Candidate, ...],
) -> Manifest:
    """What a manifest would say if the folder had one."""
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
            cache_bytes=cache_bytes(contract.states),
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
    """Whose folder it looks like."""
    if (folder / GENAI_CONFIG).is_file():
        return "onnxruntime-genai"
    inside = any(file.startswith(f"{SUBFOLDER}/") for file, _ in chosen.files)
    config = folder / CONFIG
    if not config.is_file():
        return "onnx"
    return "transformers.js" if inside or "transformers.js_config" in read_json(config) else "optimum"


def precision_of(graph: GraphFacts) -> str:
    """The precision of the weights, in the words of an export: what most of them are."""
    stored = graph.weights
    if graph.packed:
        return f"int{max(graph.packed, key=lambda bits: (graph.packed[bits], -bits))}"
    if TABLED in graph.operators:
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
    """The floating-point type of most weights."""
    floats = {name: count for name, count in graph.weights.items() if name in ("float32", "float16", "bfloat16")}
    return max(floats, key=lambda name: floats[name], default="float32")


def attention_of(graph: GraphFacts) -> str:
    """How attention is computed: by which operator, or by primitive ones."""
    operators = {
        "com.microsoft.GroupQueryAttention": "gqa",
        "com.microsoft.MultiHeadAttention": "mha",
        "com.microsoft.SparseAttention": "sparse",
        "com.microsoft.Attention": "contrib",
        "Attention": "onnx",
    }
    return next((name for operator, name in operators.items() if operator in graph.operators), "primitives")
