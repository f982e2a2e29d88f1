"""Exporters, one file each: (checkpoint, work, target) -> attempts, the variants of graphs with their contract.

`Work` is the state of an export: options, progress and notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.export.target import target_record

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx_ir as ir

    from partita.export.checkpoint.companions import Reader
    from partita.export.checkpoint.description import Checkpoint
    from partita.export.options import Asked, ExportOptions
    from partita.export.progress import Progress, Stage
    from partita.export.target import GraphVariant, NodeSupport, Smoke, Target
    from partita.export.verify.known_answer import KnownAnswer
    from partita.export.verify.quality import OpenScorer, SourceLogits
    from partita.package.folder import AdapterRecord, Graph, Manifest
    from partita.package.records import (
        Calibration,
        HalfPrecisionWeights,
        PackedKind,
        PackedWeights,
        PrefillChoice,
        TargetRecord,
        Verification,
    )


ReadFolder = Callable[[Path, int, int], "Graph"]
"""Reads the graphs of another exporter: (folder, batch size, max length) -> graph record. Raises PackageError."""
Replay = Callable[[Path, "Manifest"], "Verification"]
"""Replays the known answer of an unpublished package on the CPU provider: folder, manifest -> result."""
Locate = Callable[[Path, "Manifest", "Checkpoint"], str]
"""Returns where the results of an unpublished package first differ from the source model's."""
WriteAdapter = Callable[[Path, Mapping[str, "npt.NDArray[Any]"]], None]
"""Writes an adapter file of ONNX Runtime: path, values of graph inputs by name."""


@dataclass(slots=True)
class Work:
    """State shared by all stages."""

    options: ExportOptions
    progress: Progress
    folder: Path
    """The folder in which the package is made."""
    recorded_options: Asked = field(default_factory=dict)
    """The options to record in the manifest."""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    supports: NodeSupport | None = None
    """Probes the CPU provider with nodes of passes, where there is no target; None: no probes."""
    read_folder: ReadFolder | None = None
    replay: Replay | None = None
    """Runs the known answer on the CPU provider; None only where nothing is written."""
    smoke: Smoke | None = None
    """Runs a written package; None: only the known answer runs."""
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


@dataclass(frozen=True, slots=True)
class SwitchedAdapter:
    """A switchable adapter."""

    record: AdapterRecord
    parameters: Callable[[], Mapping[str, npt.NDArray[Any]]]
    """Reads the adapter's values for the graph inputs, by name."""
    known_answer: Callable[[], KnownAnswer]
    """Runs the source model with the adapter."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The graphs of a model, with the data to write, run and verify them."""

    label: str
    """The option that selects this variant, e.g. `--attention gqa`."""
    checkpoint: Checkpoint
    models: tuple[ir.Model, ...]
    """One per file of the record. Weights may be lazy sources or tensors."""
    graph: Graph
    """The manifest record; its weight_bytes are those planned before the weights are written."""
    parameters: int
    """Weights that the graphs use; a tied weight counts once."""
    original_parameters: int
    """Parameters of the source model."""
    known_answer: Callable[[Callable[[Any], object] | None], KnownAnswer]
    """Runs the source model; its argument gets the loaded model first."""
    caution: str
    """A known limitation of this kind of model with its remedy, as the end of a sentence."""
    variant: GraphVariant | None = None
    """None: of another exporter."""
    unused: tuple[str, ...] = ()
    """Checkpoint tensors that no graph uses, by module."""
    passes: Mapping[str, int] = field(default_factory=dict)
    """Number of changes per pass."""
    packed: PackedWeights | None = None
    """The record of quantised weights."""
    calibrate: Callable[[Path, Stage], tuple[Calibration, tuple[PackedKind, ...]]] | None = None
    """Calibrates the weights into a folder, which must exist until they are written; None without calibration."""
    prefill: PrefillChoice | None = None
    """The record of a separate prefill graph, where one was requested."""
    adapters: tuple[AdapterRecord, ...] = ()
    """Adapters merged into the weights."""
    switched: tuple[SwitchedAdapter, ...] = ()
    """Switchable adapters."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Package name -> version, of tools that ran in another process."""
    half_weights: HalfPrecisionWeights | None = None
    """The record of weights stored in 16 bits and computed in float32."""


class Attempts:
    """The variants of a model, in order of preference; in this class a single one, of another exporter."""

    target: Target | None
    """The provider of the package; None where it is not probed."""

    def __init__(self, exported: Exported, target: Target | None) -> None:
        self.exported, self.target = exported, target
        self.rejected: list[str] = []

    def best(self) -> Exported | None:
        """The next variant; None when all were tried. Raises UnsupportedModelError when the model fits none."""
        return None if self.rejected else self.exported

    def reject(self, exported: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: it does not run, or it `ran` and computed wrong results."""
        self.rejected.append(f"{exported.graph.attention} {detail}")

    def rejections(self) -> list[str]:
        """The rejected variants with their reasons."""
        return self.rejected

    def reason(self, exported: Exported) -> str:
        """The reason for the choice, in one sentence."""
        return f"exported by {', '.join(' '.join(tool) for tool in exported.tools.items())}"

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The manifest record of the target; None without one. `result`: of the known answer on it."""
        return target_record(self.target, result, how=f"{self.exported.graph.attention} writes one graph")
