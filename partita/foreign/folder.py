"""Open a folder as a manifest: that of a package, or one inferred from graphs and configuration files.

optimum writes model.onnx, or decoder_model.onnx for the first step and decoder_with_past_model.onnx for the others, or
both merged into decoder_model_merged.onnx. Hub repositories for transformers.js have the same files under onnx/, in
several precisions: model_q4.onnx, model_fp16.onnx, ... onnxruntime-genai names its file in genai_config.json.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

from pydantic import ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign import GraphFacts, read_graph
from partita.foreign.evidence import EMPTY_CONTRACT, Evidence, Written, read_evidence, read_written
from partita.foreign.inference import CORRECT, LONGEST, Inference
from partita.foreign.ports import adapter_files, adapter_inputs
from partita.foreign_paths import CONFIG, GENAI_CONFIG, ONNX, ONNX_FOLDER
from partita.observations.text_format import listing
from partita.options.fields import group, path_of
from partita.options.groups import ForeignFolder
from partita.package.contract import Contract, Phase, state_bytes
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
from partita.remedies import DECODERS_ONLY, Remedy

PLAIN = "model"
"""The user's name for the variant of a file without a suffix."""
MERGED, FIRST, LATER = "decoder_model_merged", "decoder_model", "decoder_with_past_model"
DECODER = re.compile(rf"({PLAIN}|{MERGED}|{LATER}|{FIRST})(?:_(.*))?")
"""File names of a decoder without their ending, and their variant."""
OTHER_MODELS = re.compile(
    r"(^|_)(encoder|vision|visual|image|audio|speech|text_encoder|text_model|embed_tokens|embeddings?|unet|vae"
    r"|prepare_inputs_embeds|projector|vocoder)(_|$)"
)
"""Name parts of files that are a part of a multimodal model, or not a decoder."""
CHOOSE = Remedy("choose one of them", options=("--variant", "{variant}"))
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model in a folder: a file, or one for the first step and one for the others."""

    variant: str
    """q4, fp16, ...; empty for the plain one."""
    files: tuple[tuple[str, Phase], ...]
    """Relative to the folder."""

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.variant or PLAIN


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
        for home in (folder, folder / ONNX_FOLDER)
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
    inside = any(file.startswith(f"{ONNX_FOLDER}/") for file, _ in chosen.files)
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


def onnx_files(names: Iterable[str]) -> tuple[str, ...]:
    """The ONNX files among the names, in the folder and its subfolder onnx/."""
    return tuple(sorted(n for n in names if n.endswith(ONNX) and str(PurePosixPath(n).parent) in (".", ONNX_FOLDER)))


def refuse_other_models(folder: object, names: Sequence[str]) -> None:
    """Raise PackageError for encoder-decoders and models of images or sound, by file names."""
    stems = {PurePosixPath(name).stem: name for name in names}
    odd = [name for stem, name in stems.items() if OTHER_MODELS.search(stem)]
    if odd:
        raise PackageError(
            f"{folder}: {listing(odd[:5])}: component of an encoder-decoder or multimodal model, which "
            "Partita does not support",
            remedy=DECODERS_ONLY,
        )


def candidates(names: Sequence[str]) -> tuple[Candidate, ...]:
    """Every decoder model among the ONNX files `names`, the plain one first; single files are preferred."""
    known = {name: found for name in names if (found := DECODER.fullmatch(PurePosixPath(name).stem))}
    if not known:  # unknown names: each file is a candidate
        single = len(names) == 1
        return tuple(Candidate("" if single else PurePosixPath(name).stem, ((name, "any"),)) for name in names)
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name, found in known.items():
        groups.setdefault((found[2] or "", str(PurePosixPath(name).parent)), {})[found[1]] = name
    return tuple(Candidate(variant, _files(of)) for (variant, _), of in sorted(groups.items()))


def _files(of: dict[str, str]) -> tuple[tuple[str, Phase], ...]:
    """The files of one variant to run. `of`: stem -> file."""
    if whole := of.get(PLAIN) or of.get(MERGED):
        return ((whole, "any"),)
    if FIRST in of and LATER in of:
        return ((of[FIRST], "prefill"), (of[LATER], "decode"))
    return ((of.get(LATER) or of[FIRST], "any"),)


def choose(folder: object, found: Sequence[Candidate], variant: str | None) -> Candidate:
    """The candidate `variant` names, else the plain or only one. Raises UsageError, PackageError for several."""
    if variant is not None:
        named = (
            [each for each in found if any(variant == file for file, _ in each.files)]  # a whole path is unique
            or [each for each in found if variant in (each.name, each.variant)]
            or [each for each in found if any(variant in (Path(file).name, Path(file).stem) for file, _ in each.files)]
        )
        if not named:
            raise UsageError(f"`variant={variant}`: no such variant; {folder} has {listing(_names_with_files(found))}")
    else:
        named = [each for each in found if not each.variant] or list(found)
    if len(named) > 1:
        first = named[0].name if len({each.name for each in named}) > 1 else named[0].files[0][0]
        raise PackageError(
            f"{folder}: {len(named)} models match: {listing(_names_with_files(named))}",
            remedy=CHOOSE.filled(variant=first),
        )
    return named[0]


def files_of_other_variants(folder: object, names: Sequence[str], variant: str | None) -> list[str]:
    """The ONNX files that the chosen variant does not need, with their data, whose names begin with theirs."""
    models = onnx_files(names)
    if GENAI_CONFIG in names or not models:
        return []
    refuse_other_models(folder, models)
    chosen = {file for file, _ in choose(folder, candidates(models), variant).files}
    others = tuple(file for file in models if file not in chosen)
    return [name for name in names if name.startswith(others)]


def _names_with_files(found: Sequence[Candidate]) -> list[str]:
    """Candidates with their files: `q4 (onnx/model_q4.onnx)`."""
    return [f"{each.name} ({' and '.join(file for file, _ in each.files)})" for each in found]
