"""What an exporter is, and what it hands over: graphs, and what running needs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx_ir as ir

    from partita.export.checkpoint.description import Checkpoint
    from partita.export.options import ExportOptions
    from partita.export.progress import Stage
    from partita.export.target import Target
    from partita.export.verify.known_answer import KnownAnswer
    from partita.export.work import Work
    from partita.package.contract import Contract
    from partita.package.folder import AdapterRecord
    from partita.package.records import (
        Calibration,
        NarrowWeights,
        PackedKind,
        PackedWeights,
        PrefillChoice,
        TargetRecord,
        Verification,
    )


@dataclass(frozen=True, slots=True)
class SwitchedAdapter:
    """An adapter beside the weights."""

    record: AdapterRecord
    parameters: Callable[[], Mapping[str, npt.NDArray[Any]]]
    """What it has for the inputs of the graphs, by name; read when this is called."""
    answer: Callable[[], KnownAnswer]
    """What the original computes with it; it is run when this is called."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A model as graphs: all that writing, running and verifying them needs."""

    label: str
    """How it was written, as the user would ask for it: `--attention gqa`."""
    attention: str
    """How attention and cache are written, by name."""
    checkpoint: Checkpoint
    models: tuple[ir.Model, ...]
    """One for each file of the contract. Weights may be sources that are yet to be read, or tensors anywhere."""
    contract: Contract
    """Its weight_bytes are not known before they are written."""
    parameters: int
    """Weights that the graphs use; a tied one counts once."""
    original_parameters: int
    """Those of the original model, which is run for the known answer."""
    answer: Callable[[], KnownAnswer]
    """What the original computes; it is run when this is called."""
    unused: tuple[str, ...]
    """What the checkpoint holds and no graph uses, by module."""
    passes: Mapping[str, int]
    """How many places each pass has changed."""
    caution: str
    """What is known to go wrong with a model like this one, and what to do, as the end of a sentence on that."""
    packed: PackedWeights | None = None
    """What became of the weights, where the precision packs them."""
    calibrate: Callable[[Path, Stage], tuple[Calibration, tuple[PackedKind, ...]]] | None = None
    """Rounds the weights on a text, into a folder that has to last until they are written, and says what became of
    them; None: there is no text.
    """
    widen: Callable[[float], bool] | None = None
    """Packs weights wider from now on, because so large a ratio of perplexities was measured; False: it cannot."""
    prefill: PrefillChoice | None = None
    """Whether prompts have a graph in another precision, where one was asked for."""
    adapters: tuple[AdapterRecord, ...] = ()
    """Those that are in its weights."""
    switched: tuple[SwitchedAdapter, ...] = ()
    """Those that are beside them, for runs to switch on."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Versions of what had a part in it outside of this process, by name."""
    narrow: NarrowWeights | None = None
    """What is kept in 16 bits and computed with in float32, where anything is."""


class Attempts(Protocol):
    """The ways in which an exporter can write one model, the best first."""

    @property
    def target(self) -> Target | None:
        """The provider that the package is for; None when nobody is asked."""

    def best(self) -> Exported | None:
        """What to try next; None when all was tried. Raises UnsupportedModelError when the model fits nothing."""

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        """Do not try it again: it does not run, or it `ran` and computed something else."""

    def left_out(self) -> list[str]:
        """Everything that was not taken, with its reason."""

    def reason(self, taken: Exported) -> str:
        """Why it is this one, in one sentence."""

    def record(self, result: Verification | None) -> TargetRecord | None:
        """What the manifest keeps of the target; None when there is none. `result`: of the known answer on it."""

    def others(self) -> Sequence[Attempts]:
        """Where one way was asked for: each of the others, alone, to say what would have run."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """One way from a checkpoint to graphs."""

    name: str
    summary: str
    """What it is, in a line."""
    attempts: Callable[[Checkpoint, Work, Target | None], Attempts]
    """Looks at the model, as long as its cache is to be, and says how it can be written. Raises a PartitaError."""
    packs: bool = False
    """It packs weights where the precision asks for that; another is not asked for int8 or int4."""
    adapts: bool = False
    """It takes adapters."""
    check: Callable[[ExportOptions], None] = lambda options: None
    """Raises UsageError for what else it does not do, given options that are settled."""
