"""The state of an export, and its options whose default depends on the checkpoint and the target.

The default precision keeps the stored integers (int4 or int8), and is fp32 for a checkpoint without integers. Float
precisions dequantise. Rounding a second time needs `requantise`.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import UnsupportedModelError, UsageError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.stored_formats import AffineWeight, container
from partita.export.checkpoint.weight_files import few
from partita.export.options import AUTO, OF_ROUNDING, ExportOptions, check_options
from partita.export.passes.narrow_weights import question
from partita.export.target import Target
from partita.options.groups import PrecisionName
from partita.package.folder import QuantisedSource

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from partita.export.checkpoint.companions import Reader
    from partita.export.options import Asked
    from partita.export.progress import Progress
    from partita.export.target import NodeSupport, Smoke
    from partita.export.verify.quality import OpenScorer, SourceLogits
    from partita.package.folder import FileRecord, Graph, Manifest
    from partita.package.known_answer import KnownAnswer
    from partita.package.records import Verification

ReadFolder = Callable[[Path, int, int], "Graph"]
"""Reads the graphs of another exporter: (folder, batch size, max length) -> graph record. Raises PackageError."""
Replay = Callable[[Path, "Manifest"], "Verification"]
"""Replays the known answer of an unpublished package on the CPU provider: folder, manifest -> result."""
Locate = Callable[[Path, "Manifest", "Checkpoint"], str]
"""Returns where the results of an unpublished package first differ from the source model's."""
WriteAdapter = Callable[[Path, Mapping[str, "npt.NDArray[Any]"]], None]
"""Writes an adapter file of ONNX Runtime: path, values of graph inputs by name."""
WIDE, CPU = "float32", "cpu"
X86 = frozenset({"x86_64", "amd64"})


@dataclass(slots=True)
class Work:
    """The state of an export. The functions that run a package come from the caller: this folder may not import the
    runtime."""

    options: ExportOptions
    progress: Progress
    folder: Path
    """The folder in which the package is made."""
    recorded_options: Asked = field(default_factory=dict)
    """The options to record in the manifest."""
    source_files: Sequence[Future[FileRecord]] = ()
    """Records of the checkpoint's files, which a thread hashes."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    supports: NodeSupport | None = None
    """Probes the CPU provider with nodes of passes, where there is no target; None: no probes."""
    read_folder: ReadFolder | None = None
    replay: Replay | None = None
    """None only where nothing is written."""
    smoke: Smoke | None = None
    """Runs a written package on the CPU provider; None: only the known answer runs."""
    reader: Reader | None = None
    """Reads the files that only generate reads; None: they are not checked."""
    scorer: OpenScorer | None = None
    """None: no quality is measured."""
    write_adapter: WriteAdapter | None = None
    """None: no switchable adapters are written."""
    locate: Locate | None = None
    """None: a mismatch is not located."""
    source_logits: SourceLogits | None = None
    """Logits of the source model for the quality text, for all attempts."""
    known_answers: dict[object, KnownAnswer] = field(default_factory=dict)
    """Known answers of all attempts: by prompt length, rounded weights and adapter."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Ends with the export: resources needed until everything is written."""

    @property
    def scratch(self) -> Path:
        """A folder on the package's disk for large temporary files."""
        return self.folder.parent


def add_note(work: Work, note: str) -> None:
    """Add a note for the user, once."""
    if note not in work.notes:
        work.notes.append(note)


def resolve(options: ExportOptions, checkpoint: Checkpoint, target: Target | None, text: Path | None) -> ExportOptions:
    """The options with defaults by checkpoint and target. `text`: of the quality. Raises as `with_stored`."""
    options = with_stored(options, checkpoint)
    if options.computing.bits is not None and options.activations is None:
        options = replace(options, activations="fp32" if target is None else target.kernels.activations)  # type: ignore[arg-type]
    if options.measures and options.verify and options.quality_text is None:
        options = replace(options, quality_text=text)
    return options


def with_stored(options: ExportOptions, checkpoint: Checkpoint) -> ExportOptions:
    """The options with `auto` replaced. Raises UsageError, UnsupportedModelError for other stored formats."""
    found = checkpoint.quantised
    if found is None:
        if options.requantise:
            raise UsageError(f"`requantise=True`: the weights of {checkpoint.source_name} are floats; omit it")
        return _with_precision(options, EXACT.name) if options.precision == AUTO else options
    bits = None if options.precision == AUTO else PRECISIONS[options.precision].bits
    if options.requantise:
        if bits is None:
            raise UsageError("`requantise=True` quantises weights a second time and needs `precision=int4` or int8")
        return options
    if options.precision != AUTO and bits is None:
        return options
    affine = [weight for weight in found.weights.values() if isinstance(weight, AffineWeight)]
    if options.precision == AUTO and not affine:
        return _with_precision(options, EXACT.name)
    if len(affine) < len(found.weights):
        raise UnsupportedModelError(
            f"{checkpoint.location}: the checkpoint is quantised with {found.method}, and a package cannot store "
            "its numbers unchanged; set `precision=bf16`, fp16 or fp32 to keep the values in more space, or "
            "add `requantise=True` to `precision=int8` or int4 to quantise them a second time"
        )
    elements = Counter[str]()
    for weight in affine:
        elements[f"int{container(weight)}"] += math.prod(weight.shape)
    own = max(elements, key=lambda name: elements[name])
    if options.precision not in (AUTO, own):
        raise UsageError(
            f"`precision={options.precision}`: {checkpoint.source_name} is already quantised with "
            f"{found.method}, as {own}; omit `precision` to keep the stored weights, or add "
            "`requantise=True` to quantise them a second time"
        )
    for name in OF_ROUNDING:
        value = getattr(options, name)
        if value is None:
            continue
        kept = f"`{name}={value}`: the weights of {checkpoint.source_name} are kept as stored"
        if name == "calibrate" and options.cache_precision is not None:
            raise UsageError(f"{kept}, and the cache scales are calibrated on `quality_text`: give the text there")
        raise UsageError(f"{kept} ({found.method}); omit it, or add `requantise=True` to quantise them a second time")
    return _with_precision(options, own)


def _with_precision(options: ExportOptions, precision: str) -> ExportOptions:
    """The options with another precision. Raises UsageError where other options contradict it."""
    changed = replace(options, precision=cast("PrecisionName", precision))
    check_options(changed)
    return changed


def with_activations(options: ExportOptions, target: Target | None, note: Callable[[str], object]) -> ExportOptions:
    """The options with the `activations` of a 16-bit package: as requested, else float32 where the target has no other
    MatMul kernel."""
    computing = PRECISIONS[options.named]
    if options.activations is not None or target is None or computing.dtype == WIDE:
        return options
    reason = f"has no MatMul kernel for {computing.dtype}"
    if computing.cpu_dtype is None:  # the CPU provider runs it between Casts on x86 processors
        if target.provider != CPU or platform.machine().lower() not in X86 or target.by_default:
            return options
        reason += " on x86 processors"
    elif target.supports is None or target.supports([question("MatMul", computing.dtype)])[0]:
        return options
    note(
        f"{target.provider} {reason}: weights are stored in {computing.dtype}, and activations are {WIDE}; "
        f"`activations={options.precision}` writes {computing.dtype} arithmetic"
    )
    return replace(options, activations="fp32")


def takes_stored(options: ExportOptions, checkpoint: Checkpoint) -> bool:
    """Whether the stored integers are kept."""
    return checkpoint.quantised is not None and options.computing.bits is not None and not options.requantise


def check_merged(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError where an adapter is merged into stored integers that are to be kept."""
    if checkpoint.without_adapter is None or checkpoint.quantised is None or not takes_stored(options, checkpoint):
        return
    changed = [
        name
        for name in checkpoint.quantised.weights
        if checkpoint.tensors[name] is not checkpoint.without_adapter[name]
    ]
    if changed:
        raise UnsupportedModelError(
            f"`adapter={options.adapter}`: cannot merge into weights that {checkpoint.location} stores as "
            f"integers ({checkpoint.quantised.method}), because the sums are not such integers: "
            f"{few(changed)}; keep it separate with `with_adapters`, set `precision=bf16`, fp16 or fp32 "
            "to dequantise the weights, or add `requantise=True` to quantise them a second time"
        )


def source_of(options: ExportOptions, checkpoint: Checkpoint) -> QuantisedSource | None:
    """The manifest record of a quantised checkpoint; None for float weights."""
    found = checkpoint.quantised
    if found is None:
        return None
    taken: Literal["as stored", "requantised", "dequantised"] = "dequantised"
    if options.computing.bits is not None:
        taken = "requantised" if options.requantise else "as stored"
    return QuantisedSource(method=found.method, weights=len(found.weights), conversion=taken)


def notes(options: ExportOptions, checkpoint: Checkpoint) -> list[str]:
    """Notes for the user on a quantised checkpoint, in sentences."""
    if checkpoint.quantised is None:
        return []
    again = (
        f"requantised: weights stored with {checkpoint.quantised.method} are quantised a second time; quality is "
        "measured against the stored weights, so the loss of the first quantisation is not included"
    )
    return [*checkpoint.quantised.notes, *([again] if options.requantise else [])]
