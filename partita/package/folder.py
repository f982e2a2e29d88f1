"""The package on disk: read, write and check its manifest and files. Shared by `export` and `runtime`.

The JSON Schema of the manifest is published in docs/package.schema.json.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from partita import foreign_paths
from partita.dtypes import EXACT, PRECISIONS, precision
from partita.errors import PackageError, PartitaError
from partita.package.contract import Contract, Record, Size
from partita.package.records import (
    ForeignRecord,
    HalfPrecisionWeights,
    PackedWeights,
    PrefillChoice,
    Quality,
    QuantisedCache,
    SmokeRecord,
    TargetRecord,
    Verification,
)
from partita.remedies import Remedy, is_lfs_pointer, lfs_pull
from partita.untrusted_files import KINDS, irregular, kind_of, parsed_record, read_capped, read_json_value

SCHEMA: Final = "partita.package/1"
MANIFEST = foreign_paths.MANIFEST
WEIGHTS = "model.onnx.data"
MODEL_PACKAGE = {"schema_version", "components"}
"""Keys of the manifest of a model package of ONNX Runtime."""
EXPORT_AGAIN = Remedy("export it again", ("partita", "export", "{checkpoint}", "{out}", "--force", "{options}"))
REMOVE_FIRST = Remedy("remove the folder, then export again", ("partita", "export", "{checkpoint}", "{out}"))
GIVE_MODEL = Remedy("give a package, or a folder with one model")
GET_AGAIN = Remedy("download the folder again")
KNOWN_ANSWER = "known_answer.safetensors"
QUALITY = "quality.safetensors"
COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("vocab.txt", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "tekken.json", "emoji.json"),
    *("prophetnet.tokenizer", "source.spm", "target.spm"),
)
"""Checkpoint files that a package contains unchanged."""

PLACES = ("", "onnx", "additional_chat_templates")
"""Subfolders of a model folder that Partita or transformers reads."""
READ = re.compile(
    r"[^.].*\.(json|jinja|safetensors|bin|pt|pth|gguf|onnx(_.*)?|data|npy|py|txt|toml|model|tiktoken|tokenizer|spm|vocab"
    r"|bpe|codes)",
    re.IGNORECASE,
)
"""Names of files that Partita or a library reads from a model folder. Files named in other files are checked on
reading."""

TOLERANCES = {name: precision.tolerance for name, precision in PRECISIONS.items()}
"""Precision -> maximum max_rel_error against the float32 source model."""
SHOWN = 200
"""Maximum characters of a name from a file in a message."""


def _word(text: str) -> str:
    """Validate a name without spaces and control characters. Raises ValueError."""
    if not re.fullmatch(r"[\w.+-]{1,64}", text):
        raise ValueError("it must have 1 to 64 letters, digits or any of . + - _")
    return text


Word = Annotated[str, AfterValidator(_word)]
"""Not a pydantic pattern, whose compilation can lose a signal."""
TokenizerKind = Literal["none", "tokenizers", "transformers"]
"""The library for the package's tokenizer: none, tokenizers with tokenizer.json, or transformers."""


class FileRecord(Record):
    """One file of the package. `name` is relative to the package folder."""

    name: str
    size_bytes: int = Field(ge=0)
    sha256: str
    """Empty for a foreign folder."""


class QuantisedSource(Record):
    """The quantisation of the checkpoint before its export."""

    method: str
    """GPTQ, AWQ, fp8, …"""
    weights: int
    """Number of quantised weights in the checkpoint."""
    conversion: Literal["as stored", "requantised", "dequantised"]
    """The package has the stored integers or codes; quantised them again; or has floats."""


LOST_INPUTS = {"image": ("visual", "vision", "image"), "audio": ("audio", "speech")}
"""Inputs of a multimodal model -> words in the names of the modules that read them."""


def not_exported(unused: Sequence[str]) -> str:
    """The unused parts of a checkpoint, and the inputs that the package therefore lacks; empty where none."""
    more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
    names = " ".join(unused).casefold()
    lost = [given for given, words in LOST_INPUTS.items() if any(word in names for word in words)]
    cannot = f"; {' and '.join(lost)} input is not supported" if lost else ""
    return f"{', '.join(unused[:5])}{more}{cannot}" if unused else ""


class Source(Record):
    """The checkpoint that the package was exported from."""

    checkpoint: str
    """Folder name or hub id, as given."""
    model_type: str
    architecture: str
    dtype: str
    """dtype of most weights in the checkpoint files, in ONNX spelling: float32, float16, bfloat16; for quantised
    weights that of their scales."""
    parameters: int
    """Number of parameters that the graph uses; a tied weight counts once."""
    files: tuple[FileRecord, ...]
    unused: tuple[str, ...] = ()
    """Tensors in the weight files that no graph uses, by module, with number and size."""
    quantised: QuantisedSource | None = None
    """Null: the weights of the checkpoint are floats."""


class AdapterRecord(Record):
    """A PEFT adapter: merged into the weights, or switchable at run time."""

    name: str
    """The name for runs; for a merged adapter, that of its folder."""
    merged: bool
    kind: Literal["lora", "dora"] | None = None
    """Null for a foreign folder, whose adapter files contain only values of inputs."""
    ranks: tuple[int, ...] = ()
    modules: int | None = None
    """Number of modules whose weight it changes; null: unknown."""
    replaced_parameters: tuple[str, ...] = ()
    """Parameters that it replaces."""
    base_model: str = ""
    """The base model named by the adapter."""
    source: tuple[FileRecord, ...] = ()
    """The source files of the adapter, by name in its folder."""
    file: str | None = None
    """The package's adapter file in ONNX Runtime's format; null for a merged adapter."""
    known_answer: str | None = None
    """The known answer with this adapter; null for a merged or unverified adapter."""
    verification: Verification | None = None


class Graph(Contract):
    """The contract of all graphs, and how they were made."""

    opsets: dict[str, Annotated[int, Field(ge=1, le=1000)]]
    """Operator set per domain; "" is ONNX itself."""
    attention: Word
    """Name of the lowering of attention and cache: gqa, onnx24, …"""
    precision: Word
    without_passes: tuple[str, ...] = ()
    """Graph passes that were skipped by request."""
    cache_bytes: Size
    """Size of all state buffers in bytes."""


class Manifest(Record):
    """The description of a package for the runtime."""

    schema_id: Literal["partita.package/1"] = Field(default=SCHEMA, alias="schema")
    created: str
    """UTC, ISO 8601."""
    source: Source
    graph: Graph
    files: tuple[FileRecord, ...]
    """Every file of the package except the manifest."""
    tokenizer: TokenizerKind
    toolchain: dict[str, str]
    """Package name -> version, of everything used by the export."""
    options: dict[str, tuple[str, ...]] = {}
    """Options of `partita export` that were set, without dashes, with their values; files and folders by name."""
    verification: Verification
    target: TargetRecord | None = None
    """Null without a target to probe."""
    smoke: tuple[SmokeRecord, ...] = ()
    """One for the CPU provider and one for the target, if different."""
    packed: PackedWeights | None = None
    """Null without quantised weights."""
    prefill: PrefillChoice | None = None
    """Null where no separate prefill graph was requested."""
    adapters: tuple[AdapterRecord, ...] = ()
    half_precision: HalfPrecisionWeights | None = None
    """Null where weights have the activation dtype, or are quantised."""
    quantised_cache: QuantisedCache | None = None
    """Null where the KV cache has the activation dtype."""
    quality: Quality | None = None
    """Null where nothing is rounded (fp32 with a float cache), and where the source model was not run."""
    foreign: ForeignRecord | None = None
    """Of a folder that Partita did not write: its manifest is inferred, and is nowhere on disk. Null in a package."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @property
    def switchable(self) -> tuple[AdapterRecord, ...]:
        """Adapters that a run can switch on."""
        return tuple(record for record in self.adapters if not record.merged)

    @property
    def is_rounded(self) -> bool:
        """Whether the package as verified is rounded: to integers, or to 16 bits on a provider with 16-bit kernels."""
        named = precision(self.graph.precision)
        halves = named.dtype != EXACT.dtype and self.half_precision is None and self.verification.status == "verified"
        return self.quantised_cache is not None or named.bits is not None or halves

    @property
    def tolerance(self) -> float:
        """Maximum max_rel_error against the float32 model, of rounded or equal weights. Raises KeyError."""
        if self.quantised_cache is not None:
            return TOLERANCES["int8"]
        narrow = self.half_precision if self.packed is None else None
        exact = narrow is not None and (not narrow.rounded or narrow.compared == "rounded")
        return EXACT.tolerance if exact else precision(self.graph.precision).tolerance

    def file(self, name: str) -> FileRecord | None:
        """The record of the file called `name`; None where there is none."""
        return next((f for f in self.files if f.name == name), None)


def adapter_file(name: str) -> str:
    """The file name of a switchable adapter, in ONNX Runtime's adapter format."""
    return f"adapter-{name}.onnx_adapter"


def answer_file(name: str) -> str:
    """The file name of the known answer with an adapter."""
    return f"known_answer-{name}.safetensors"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def linked_sha256(path: Path) -> str | None:
    """The SHA-256 of a large file in a hub cache, where snapshots/REVISION/name links to blobs/SHA-256; else None."""
    target = path.resolve() if path.is_symlink() else path
    return target.name if target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name) else None


def record_file(folder: Path, name: str) -> FileRecord:
    """The record of `folder/name`."""
    path = folder / name
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=linked_sha256(path) or sha256_of(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, the last file of a package."""
    text = json.dumps(manifest.model_dump(mode="json", by_alias=True), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def is_package(folder: Path) -> bool:
    """Whether a folder has the manifest of a package, even a damaged one."""
    return (folder / MANIFEST).is_file() and not is_of_others(folder / MANIFEST)


def is_of_others(manifest: Path) -> bool:
    """Whether a manifest.json is neither a package's nor a model package's, e.g. a web application's.

    A damaged file counts as a package's.
    """
    keys = manifest_keys(manifest)
    return keys is not None and not (keys & {"schema", "graph", "files"} or keys >= MODEL_PACKAGE)


def manifest_keys(manifest: Path) -> set[str] | None:
    """The keys of the object in a JSON file; None for another or a damaged file."""
    try:
        value = read_json_value(manifest)
    except (OSError, ValueError):
        return None
    return set(value) if isinstance(value, dict) else None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a package. Raises PackageError when it is missing, damaged or of a newer Partita."""
    path = folder / MANIFEST
    try:
        check_folder(folder)
        if not path.is_file():
            foreign = foreign_paths.recognise(folder)
            raise PackageError(f"{folder}: {foreign.description}", remedy=foreign.remedy)
    except PermissionError as error:
        raise unreadable(folder) from error
    refuse_absent(path)
    remove_first = REMOVE_FIRST.filled(checkpoint="CHECKPOINT", out=folder)
    try:
        raw = parsed_record(read_capped(path))
    except ValueError as error:
        raise PackageError(f"{path}: damaged, not JSON ({error})", remedy=remove_first) from error
    if isinstance(raw, dict) and raw.keys() >= MODEL_PACKAGE:
        raise PackageError(
            f"{folder}: a model package of ONNX Runtime, which only place and inspect read", remedy=GIVE_MODEL
        )
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise PackageError(
            f"{path}: the schema is {schema!r}, but this version of Partita reads {SCHEMA!r}; use the "
            "version that wrote it"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PackageError(f"{path}: field {where}: {first['msg']}", remedy=remove_first) from error


def check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Check that every file is in the folder, with its size and, on request, hash. Raises PackageError."""
    remedy = export_again_remedy(folder, manifest)
    needed = {WEIGHTS, *(graph.file for graph in manifest.graph.files)}
    for record in manifest.files:
        path = path_inside(folder, record.name)
        if not path.is_file():
            raise PackageError(f"{path}: missing from the package", remedy=remedy)
        if hashes or record.name in needed or path.stat().st_size != record.size_bytes:
            refuse_absent(path)
        size = path.stat().st_size
        if size != record.size_bytes:
            raise PackageError(f"{path}: {size:,} bytes, the manifest states {record.size_bytes:,}", remedy=remedy)
        if hashes and record.sha256 and sha256_of(path) != record.sha256:
            what = "changed since export: its SHA-256 does not match the manifest"
            raise PackageError(f"{path}: {what}", remedy=remedy)
    if manifest.verification.status == "verified" and manifest.file(KNOWN_ANSWER) is None:
        raise PackageError(f"{folder}: verified, but its manifest does not list {KNOWN_ANSWER}", remedy=remedy)


def export_again_remedy(folder: Path, manifest: Manifest | None = None) -> Remedy:
    """The remedy that exports a damaged package again, with its recorded options."""
    if manifest is None:
        return EXPORT_AGAIN.filled(checkpoint="CHECKPOINT", out=folder, options=())
    if manifest.foreign is not None:
        return GET_AGAIN
    checkpoint = manifest.source.checkpoint
    options = tuple(
        word
        for name, values in manifest.options.items()
        for value in values or (None,)
        for word in (f"--{name}", value)
        if word is not None
    )
    known = checkpoint if "/" in checkpoint else "CHECKPOINT"
    return EXPORT_AGAIN.filled(checkpoint=known, out=folder, options=options)


def refuse_absent(path: Path) -> None:
    """Raise PackageError for an unreadable file or a Git LFS pointer."""
    try:
        if path.exists() and (reason := kind_of(path)):
            raise PackageError(f"{path}: {reason}")
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise unreadable(path) from error
    if is_lfs_pointer(path):
        raise PackageError(f"{path}: not a regular file", remedy=lfs_pull(path))


def unreadable(path: Path) -> PackageError:
    """The error for a file or folder of a package without read permission."""
    return PackageError(f"{path}: permission denied; make it, and its folder, readable")


def path_inside(folder: Path, name: str) -> Path:
    """`folder/name`. Raises PackageError when it leaves the folder, or is neither a regular file nor a folder."""
    parts = PurePosixPath(name)
    windows = PureWindowsPath(name)
    leaves = parts.is_absolute() or windows.drive or ".." in windows.parts or "\0" in name
    if "\\" in name and not leaves:
        problem = f"the path {name[:SHOWN]!r} is a Windows path; write {windows.as_posix()[:SHOWN]!r} instead"
        raise PackageError(problem, path=folder)
    if leaves:
        raise PackageError(f"{folder}: the path {name[:SHOWN]!r} is outside the model folder, so it is not followed")
    if (reason := irregular(folder / name, folder)) and not reason.startswith(KINDS["d"]):
        raise PackageError(f"{folder / name}: {reason}")
    return folder / name


def check_folder(folder: Path, names: Iterable[str] | None = None, kind: type[PartitaError] = PackageError) -> None:
    """Raise `kind` when a file (of `names`) is no regular file of the folder or blob of its Hugging Face cache."""
    for place in PLACES:
        home = folder / place
        if not home.is_dir():
            continue
        read = (entry.name for entry in home.iterdir() if READ.fullmatch(entry.name)) if names is None else names
        for path in (home, *(home / name for name in sorted(read))):
            if (reason := irregular(path, folder)) and not (path == home and reason.startswith(KINDS["d"])):
                raise kind(f"{reason}; put a regular file there, or remove it", path=path)
