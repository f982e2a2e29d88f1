"""Exporters, one file each: (checkpoint, options) -> graphs and their contract.

The interface of an exporter and its result.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from partita.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx_ir as ir

    from partita.export.checkpoint.description import Checkpoint
    from partita.export.checkpoint.stored_formats import QuantisedTensors
    from partita.export.options import ExportOptions
    from partita.export.progress import Stage
    from partita.export.target import Target
    from partita.export.verify.known_answer import KnownAnswer
    from partita.export.work import Work
    from partita.package.contract import Contract
    from partita.package.folder import AdapterRecord
    from partita.package.records import (
        Calibration,
        HalfPrecisionWeights,
        PackedKind,
        PackedWeights,
        PrefillChoice,
        TargetRecord,
        Verification,
    )


@dataclass(frozen=True, slots=True)
class SwitchedAdapter:
    """A switchable adapter."""

    record: AdapterRecord
    parameters: Callable[[], Mapping[str, npt.NDArray[Any]]]
    """Reads the adapter's values for the graph inputs, by name."""
    answer: Callable[[], KnownAnswer]
    """Runs the source model with the adapter."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The graphs of a model, with the data to write, run and verify them."""

    label: str
    """The option that selects this variant, e.g. `--attention gqa`."""
    attention: str
    """Name of the lowering of attention and cache."""
    checkpoint: Checkpoint
    models: tuple[ir.Model, ...]
    """One per file of the contract. Weights may be lazy sources or tensors."""
    contract: Contract
    """Its weight_bytes are unknown before the weights are written."""
    parameters: int
    """Weights that the graphs use; a tied weight counts once."""
    original_parameters: int
    """Parameters of the source model."""
    answer: Callable[[], KnownAnswer]
    """Runs the source model."""
    unused: tuple[str, ...]
    """Checkpoint tensors that no graph uses, by module."""
    passes: Mapping[str, int]
    """Number of changes per pass."""
    caution: str
    """A known limitation of this kind of model with its remedy, as the end of a sentence."""
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
    narrow: HalfPrecisionWeights | None = None
    """The record of weights stored in 16 bits and computed in float32."""


class Attempts(Protocol):
    """The variants in which an exporter can write a model, in order of preference."""

    @property
    def target(self) -> Target | None:
        """The provider of the package; None where it is not probed."""

    def best(self) -> Exported | None:
        """The next variant; None when all were tried. Raises UnsupportedModelError when the model fits none."""

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: it does not run, or it `ran` and computed wrong results."""

    def omitted(self) -> list[str]:
        """The rejected variants with their reasons."""

    def reason(self, taken: Exported) -> str:
        """The reason for the choice, in one sentence."""

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The manifest record of the target; None without one. `result`: of the known answer on it."""

    def others(self) -> Sequence[Attempts]:
        """For a requested variant: each of the others, to suggest one that runs."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """A way from a checkpoint to graphs."""

    name: str
    summary: str
    """A description in one line."""
    attempts: Callable[[Checkpoint, Work, Target | None], Attempts]
    """Inspects the model and returns its variants. Raises a PartitaError."""
    packs: bool = False
    """It quantises weights."""
    adapts: bool = False
    """It supports adapters."""
    check: Callable[[ExportOptions], None] = lambda options: None
    """Raises UsageError for other unsupported options."""


__all__ = ["Attempts", "Exported", "Exporter", "check_name", "exporter", "names", "refuse_unable"]


def names() -> tuple[str, ...]:
    """Names of all exporters, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def check_name(name: str) -> None:
    """Raise UsageError, which lists the names, for an unknown exporter. Imports none of them."""
    if name not in names():
        raise UsageError(f"`exporter={name}`: unknown exporter; choose one of {', '.join(names())}")


def exporter(name: str) -> Exporter:
    """The exporter with this name. Raises UsageError where there is none."""
    check_name(name)
    found = importlib.import_module(f"{__name__}.{name}").EXPORTER
    assert isinstance(found, Exporter)
    return found


def refuse_unable(chosen: Exporter, options: ExportOptions, quantised: QuantisedTensors | None = None) -> None:
    """Raise UsageError for adapters or quantised weights that the exporter does not support."""
    if (options.adapter is not None or options.with_adapters) and not chosen.adapts:
        said = f"`{'with_adapters' if options.adapter is None else 'adapter'}`"
        raise UsageError(f"{said}: exporter {chosen.name} does not support adapters; omit `exporter`")
    if chosen.packs:
        return
    omitted = f"omit `exporter={chosen.name}`"
    if quantised is not None:
        raise UsageError(
            f"{options.checkpoint}: the checkpoint is quantised ({quantised.method}), and exporter "
            f"{chosen.name} cannot read such weights; {omitted}"
        )
    if options.computing.bits is not None:
        raise UsageError(
            f"`precision={options.precision}`: exporter {chosen.name} does not quantise weights; choose "
            f"another `precision`, or {omitted}"
        )
