"""The package on disk: its manifest, and how to read, write and check it.

The only thing that `export` and `runtime` share. Knows file names, hashes and tensor contracts; knows nothing of torch,
ONNX Runtime or how a graph is made. The manifest's JSON Schema is published in docs/package.schema.json.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from partita import strangers
from partita.contract import Contract, Record
from partita.dtypes import EXACT, PRECISIONS
from partita.errors import PackageError
from partita.remedies import Remedy, is_lfs_pointer, lfs_pull, permission

SCHEMA: Final = "partita.package/1"
MANIFEST = strangers.MANIFEST
WEIGHTS = "model.onnx.data"
EXPORT_AGAIN = Remedy("export it again", ("partita", "export", "{checkpoint}", "{out}", "--force"))
EXPORT_LIKE = replace(
    EXPORT_AGAIN,
    command=(
        *EXPORT_AGAIN.command,
        "--attention",
        "{attention}",
        "--precision",
        "{precision}",
        "--max-length",
        "{max_length}",
        "--batch-size",
        "{batch_size}",
    ),
)
KNOWN_ANSWER = "known_answer.safetensors"
QUALITY = "quality.safetensors"
HASH_CHUNK_BYTES = 1 << 20

TOLERANCES = {name: precision.tolerance for name, precision in PRECISIONS.items()}
ROUNDED_CACHE = "int8"
"""The precision whose tolerance a rounded cache has: that of numbers which were rounded to so many bits."""
"""Largest max_rel_error against the original model in float32 that passes, by precision of the package."""

TokenizerKind = Literal["none", "tokenizers", "transformers"]
"""What reads the package's tokenizer: nothing is there, tokenizer.json suffices, or transformers has to."""


class FileRecord(Record):
    """One file of the package. `name` is relative to the package folder."""

    name: str
    size_bytes: int = Field(ge=0)
    sha256: str


class Source(Record):
    """The checkpoint that the package was exported from."""

    checkpoint: str
    """Folder name or hub id, as given."""
    model_type: str
    architecture: str
    dtype: str
    """dtype of most weights in the checkpoint files, in ONNX spelling: float32, float16, bfloat16."""
    parameters: int
    """Number of weights the graph uses; a tied weight counts once."""
    files: tuple[FileRecord, ...]
    unused: tuple[str, ...] = ()
    """What the weight files hold and no graph uses, by module, with the number of tensors and their size."""


class Graph(Contract):
    """What all graphs of the package have in common: what running needs, and how they were made."""

    opsets: dict[str, int]
    """Operator set per domain; "" is ONNX itself."""
    attention: str
    """Name of the lowering of attention and cache: gqa, onnx24, …"""
    precision: str
    without_passes: tuple[str, ...] = ()
    """Passes over the graphs that were left out because that was asked for."""
    cache_bytes: int
    """All state buffers together."""


class StepError(Record):
    """How far one step of the known answer was off."""

    step: str
    """prefill, chunked prefill, or decode 1 .. n."""
    output: str
    max_abs_error: float
    max_rel_error: float
    """max |ours - reference| / max |reference| over the output."""
    tokens_equal: bool
    """Greedy tokens agree in every row that has a clear winner; see `Verification.near_ties`."""
    rerouted: int = 0
    """Positions that do not count; see `Verification.rerouted`."""


class Verification(Record):
    """Whether the graph computes what its model computes, and how that was found out."""

    status: Literal["verified", "unverified"]
    detail: str
    """How it was verified, or why it was not."""
    provider: str | None = None
    twin: str | None = None
    """What was replayed in place of the package's own graphs, where the provider has no kernels for those; null when
    it was the package itself.
    """
    reference: str | None = None
    """What was run for the known answer."""
    tolerance: float | None = None
    """Largest max_rel_error that passes."""
    near_ties: int = 0
    """Compared positions at which the reference's two best logits are closer than the tolerance allows to tell
    apart.
    """
    rerouted: int = 0
    """Compared positions that are further from the reference, and left out, because the package is rounded and its
    model takes the best of some experts: where two are nearly equally good, rounding decides. Fewer than half.
    """
    not_run: tuple[str, ...] = ()
    """Graph files that the known answer did not run: their chunk is longer than its prompt."""
    steps: tuple[StepError, ...] = ()


class PackedKind(Record):
    """Weights that are packed in one way."""

    precision: str
    """int4 or int8."""
    block_size: int
    """Weights of a row that share a scale, and a zero point where there are any; 0: all of them."""
    zero_points: bool
    """Each block has an integer zero point of its own; False: it is the middle of the range everywhere."""
    quantiser: str
    weights: int
    parameters: int
    size_bytes: int
    """With scales and zero points."""


class Calibration(Record):
    """The text on which weights were rounded."""

    quantiser: str
    text: str
    """Name of the file."""
    text_sha256: str
    tokens: int
    """How many of its tokens the original model read."""
    window_tokens: int
    """Tokens that were read at a time, each window from the beginning of an empty cache."""
    not_calibrated: tuple[str, ...] = ()
    """Weights that are packed and were rounded without the text, because no module multiplies by them as they are;
    embeddings of their own are not among them.
    """


class UnitCost(Record):
    """What rounding some weights alone costs."""

    modules: tuple[str, ...]
    kl_mean: float
    """Of the model from the original on the text of the search, in nats."""


class TriedMix(Record):
    """A mix of widths that was judged on the text of the search."""

    wider: int
    """How many steps of the row it takes: one makes the weights of a unit wider."""
    kl_mean: float
    perplexity_ratio: float


class Mix(Record):
    """How the widths of weights were chosen."""

    text: str
    """What mixes were judged on."""
    text_sha256: str
    tokens: int
    unseen: bool
    """The quality of the package was measured on other text."""
    max_perplexity_ratio: float | None
    max_weight_size: int | None
    """Bytes."""
    steps: int
    """Of all, from the width of the package to float32."""
    taken: int
    costs: tuple[UnitCost, ...]
    """The largest first."""
    tried: tuple[TriedMix, ...]
    missed: tuple[float, ...] = ()
    """Ratios of packages that were written before this one, and not published."""


class PackedWeights(Record):
    """What became of the weights of an int8 or int4 package."""

    kinds: tuple[PackedKind, ...]
    accuracy_level: int
    """Of MatMulNBits, as the graph asks for it: 4 lets products be computed with 8-bit activations."""
    form: str = "matmul_nbits"
    """How they are written: a name of `export/quantisation/forms/`."""
    reads: str = "MatMulNBits and GatherBlockQuantized"
    """The operators that read them, in words."""
    activations: str = "fp32"
    """What they are multiplied with: fp32, fp16, or int8 where the graph itself rounds activations."""
    kept: tuple[str, ...] = ()
    """What was asked for of single modules, as MODULE=PRECISION."""
    not_packed: tuple[str, ...] = ()
    """What stayed in the type of the activations without having been asked to, and what reads it."""
    calibration: Calibration | None = None
    """null: no text was looked at."""
    mix: Mix | None = None
    """null: widths were not chosen by measuring them."""


class ProductTime(Record):
    """What a product takes as the two graphs of a pair compute it, on one thread."""

    rows: int
    """N: numbers that it gives for a token."""
    width: int
    """K: numbers of a token that it reads."""
    weights: int
    """Products of this size."""
    seconds: float
    """In the form of the decode graph."""
    prefill_seconds: float
    """In that of the prefill graph."""


class PrefillChoice(Record):
    """Whether prompts have a graph of their own, which computes in another precision, and why."""

    asked: str
    """What was asked for: int8, or auto for what is faster."""
    written: bool
    """False: one graph reads prompts and goes on."""
    reason: str
    tokens: int = 0
    """Tokens in the products that were timed; 0: nothing was."""
    products: tuple[ProductTime, ...] = ()
    packed: PackedWeights | None = None
    """The weights that the prefill graph alone reads; the others are those of `Manifest.packed`."""


class NarrowWeights(Record):
    """Matrices that lie in the file in 16 bits and are computed with in float32."""

    dtype: str
    """Of the matrices in the file."""
    weights: int
    rounded: int
    """How many of them the checkpoint has in a wider type; none: nothing is lost."""


class RoundedCache(Record):
    """Keys and values that are cached as integers, with a scale for each channel of each KV head."""

    dtype: str
    states: int
    """How many are kept so."""
    kept: tuple[str, ...] = ()
    """Past inputs of the others, which stay what they were."""
    float_bytes: int
    """What all state buffers would take without it."""
    text: str
    """What the scales were found on: name of the file."""
    text_sha256: str
    tokens: int


class PhaseQuality(Record):
    """The figures of what one graph of a pair read."""

    phase: str
    """prefill or decode."""
    tokens: int
    perplexity_ratio: float
    top1_agreement: float
    kl_mean: float


class Quality(Record):
    """What the precision costs: the package beside the original model, on the same text."""

    text: str
    """Name of the file; `random tokens` for a checkpoint without a tokenizer, whose perplexity says nothing."""
    text_sha256: str
    tokens: int
    """Tokens that were predicted."""
    window_tokens: int
    """Tokens that are read at a time, each window from the beginning of an empty cache."""
    provider: str
    """What the package ran on."""
    original_perplexity: float
    """Of the original model in float32."""
    perplexity: float
    perplexity_ratio: float
    """perplexity / original_perplexity; 1 is no loss."""
    top1_agreement: float
    """Share of the positions at which both think the same token most likely."""
    kl_mean: float
    """Kullback-Leibler divergence of the package from the original in nats, mean over the positions."""
    kl_p99: float
    """Its 99th percentile."""
    phases: tuple[PhaseQuality, ...] = ()
    """Where prompts have a graph in another precision: it read the first half of each window, and the decode graph the
    other over its cache, as in a generation. Empty otherwise.
    """


class AskedLowering(Record):
    """What a provider said of the graph in one lowering, before its weights were written."""

    attention: str
    form: Literal["contrib", "standard"] | None = None
    """How experts and recurrences were written, in ONNX Runtime's own operators or in standard ones, where that is not
    what goes with the lowering as a rule; null otherwise.
    """
    nodes: int
    left: dict[str, int]
    """Nodes that it does not take, by operator."""
    fails: str
    """What was said when the whole graph was opened or run there and failed; empty otherwise."""
    unasked: int
    """Nodes for which there was no answer."""
    disagrees: str
    """Where the known answer, replayed on the provider, was another than the model's; empty otherwise."""


class TargetRecord(Record):
    """The provider that the package was made for, what it was asked, and what it answered."""

    provider: str
    source: str
    """Who chose it: --target, or why it is the default."""
    how: str
    """How it was asked: itself, over stub libraries, or not at all and why."""
    asked: tuple[AskedLowering, ...]
    """In the order of the questions; once a provider takes a graph whole and rightly, no other is asked about."""
    unfit: dict[str, str]
    """Lowerings that the model does not fit, and why: they were not asked about."""
    verification: Literal["verified", "unverified", "not_run"]
    """The known answer, replayed on this very provider."""
    detail: str


class SmokeRecord(Record):
    """Whether the written package opens, reads a chunk of a prompt and then one token, and gives finite logits."""

    chain: str
    """The providers, as --provider takes them."""
    status: Literal["ran", "failed", "not_run"]
    detail: str
    """What was run, or what failed, or why nothing could be run here."""
    replayed: bool = False
    """It was the replay of the known answer on the package itself, which reads a prompt and tokens, too."""


class Manifest(Record):
    """Everything the runtime has to know about a package."""

    schema_id: Literal["partita.package/1"] = Field(default=SCHEMA, alias="schema")
    created: str
    """UTC, ISO 8601."""
    source: Source
    graph: Graph
    files: tuple[FileRecord, ...]
    """Every file of the package but the manifest itself."""
    tokenizer: TokenizerKind
    toolchain: dict[str, str]
    """Package name to version, of everything that had a part in the export."""
    verification: Verification
    target: TargetRecord | None = None
    """Null for a package of an earlier Partita, and when no provider was to be asked."""
    smoke: tuple[SmokeRecord, ...] = ()
    """One for the CPU provider and one for the target, where that is another; none in packages of earlier versions."""
    packed: PackedWeights | None = None
    """Null where no weights are packed."""
    prefill: PrefillChoice | None = None
    """Null where no graph for prompts alone was asked for."""
    narrow: NarrowWeights | None = None
    """Null where weights have the type that the graph computes in, or are packed."""
    rounded_cache: RoundedCache | None = None
    """Null where keys and values are cached in the type of the activations."""
    quality: Quality | None = None
    """Null for a precision of 16 bits or more with a cache of floats: there the known answer says it all."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @property
    def rounds(self) -> bool:
        """Whether the package itself, and not its twin, rounds what it computes with to integers."""
        return self.rounded_cache is not None or PRECISIONS[self.graph.precision].bits is not None

    @property
    def tolerance(self) -> float:
        """Largest max_rel_error against the original model in float32 that passes: of float32 where nothing is rounded.

        Raises KeyError for a precision that this Partita does not know.
        """
        if self.rounded_cache is not None:
            return TOLERANCES[ROUNDED_CACHE]
        exact = self.narrow is not None and not self.narrow.rounded
        return TOLERANCES[EXACT.name if exact else self.graph.precision]

    def file(self, name: str) -> FileRecord | None:
        """The record of the file called `name`, if the package has one."""
        return next((f for f in self.files if f.name == name), None)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(HASH_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def record_file(folder: Path, name: str, sha256: str | None = None) -> FileRecord:
    """Describe `folder/name`; `sha256` is computed unless the writer already knows it."""
    path = folder / name
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=sha256 or sha256_of(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, the last file a package gets."""
    text = json.dumps(manifest.model_dump(mode="json", by_alias=True), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of the package in `folder`.

    Raises PackageError when the folder is no package, the manifest is damaged, or a newer Partita wrote it.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir() or not path.is_file():
            stranger = strangers.recognise(folder)
            raise PackageError(f"{folder}: {stranger.what}", remedy=stranger.remedy)
    except PermissionError as error:
        raise unreadable(folder) from error
    refuse_absent(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PackageError(f"{path}: damaged, it is not JSON ({error})", remedy=again(folder)) from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise PackageError(
            f"{path}: schema is {schema!r}, this Partita reads {SCHEMA!r}; use the Partita that wrote it"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PackageError(f"{path}: field {where}: {first['msg']}", remedy=again(folder)) from error


def check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Check that every file is there, inside the folder, with the recorded size and, if asked, the recorded hash.

    Raises PackageError naming the first file that is not as recorded, or when a verified package does not list the
    known answer that it was verified with.
    """
    needed = {WEIGHTS, *(graph.file for graph in manifest.graph.files)}
    for record in manifest.files:
        path = inside(folder, record.name)
        if not path.is_file():
            _refuse_replaced(folder, manifest)
            raise PackageError(f"{path}: missing from the package", remedy=again(folder, manifest))
        if hashes or record.name in needed or path.stat().st_size != record.size_bytes:
            refuse_absent(path)
        size = path.stat().st_size
        if size != record.size_bytes:
            _refuse_replaced(folder, manifest)
            told = f"{size:,} bytes, the manifest says {record.size_bytes:,}"
            raise PackageError(f"{path}: {told}", remedy=again(folder, manifest))
        if hashes and sha256_of(path) != record.sha256:
            _refuse_replaced(folder, manifest)
            told = "altered since export, its SHA-256 does not match the manifest"
            raise PackageError(f"{path}: {told}", remedy=again(folder, manifest))
    if manifest.verification.status == "verified" and manifest.file(KNOWN_ANSWER) is None:
        told = f"verified, but its manifest does not list {KNOWN_ANSWER}"
        raise PackageError(f"{folder}: {told}", remedy=again(folder, manifest))


def again(folder: Path, manifest: Manifest | None = None) -> Remedy:
    """How to make a damaged package anew, with what is known of how it was made."""
    if manifest is None:
        return EXPORT_AGAIN.filled(checkpoint="CHECKPOINT", out=folder)
    graph, checkpoint = manifest.graph, manifest.source.checkpoint
    known = checkpoint if "/" in checkpoint else "CHECKPOINT"
    return EXPORT_LIKE.filled(
        checkpoint=known,
        out=folder,
        attention=graph.attention,
        precision=graph.precision,
        max_length=graph.max_length,
        batch_size=graph.batch_size,
    )


def refuse_absent(path: Path) -> None:
    """Raise PackageError when the file may not be read, or Git LFS has left a pointer in its place."""
    try:
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise unreadable(path) from error
    if is_lfs_pointer(path):
        raise PackageError(f"{path}: not the file itself", remedy=lfs_pull(path))


def unreadable(path: Path) -> PackageError:
    """The error for a file or folder of a package that this process is not permitted to read."""
    return PackageError(f"{path}: permission denied", remedy=permission(path))


def _refuse_replaced(folder: Path, manifest: Manifest) -> None:
    """Raise PackageError when the package is another one by now than `manifest` was read from."""
    if read_manifest(folder) != manifest:
        raise PackageError(f"{folder}: was replaced by another export while it was read; run the command again")


def inside(folder: Path, name: str) -> Path:
    """`folder/name`, refused with PackageError when it would leave the folder."""
    parts = PurePosixPath(name)
    path = folder / name
    if (
        parts.is_absolute()
        or ".." in parts.parts
        or "\\" in name
        or not path.resolve().is_relative_to(folder.resolve())
    ):
        raise PackageError(f"{folder}: the path {name!r} leaves the package folder; refusing to follow it")
    return path
