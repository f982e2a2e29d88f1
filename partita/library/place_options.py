"""What `partita place` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partita.check.limits import Limits
from partita.errors import UsageError
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.chain import ChainOptions
from partita.providers.cuda import PROVIDER as CUDA
from partita.spelling import spelled

MAX_RUNS = 1000
RUNS = 3
PROBE_SECONDS = 120.0
MAX_PROBE_SECONDS = 3600
RUN_SECONDS = 120.0
MAX_RUN_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """What decides how a model is placed."""

    model: Path
    """An ONNX file, or the folder of a package."""
    where: ChainOptions
    shapes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """`NAME=FILE.npy`, values of an input."""
    runs: int = RUNS
    """Session runs per phase."""
    limits: Limits = Limits()
    dry_run: bool = False
    device: str | None = None
    """Device profile of a dry run; None for the default one."""
    graph_capture: bool = False
    probe_seconds: float = PROBE_SECONDS
    """Time for experiments on nodes that fell back; 0: none."""
    run_seconds: float | None = None
    """Time for the runs of an ONNX file, None for the default; one that takes longer is given up."""
    choice: Choice = AS_IT_IS
    """What was said of a folder that Partita did not write."""

    @property
    def is_package(self) -> bool:
        """A folder is taken for a package."""
        return self.model.is_dir()


def check_options(options: PlaceOptions) -> None:
    """Check what can be checked without a provider. Raises UsageError."""
    if not 1 <= options.runs <= MAX_RUNS:
        raise UsageError(f"{spelled('runs')} is {options.runs}; it must be between 1 and {MAX_RUNS:,}")
    check_probe_seconds(options.probe_seconds)
    if options.run_seconds is not None and not 0 < options.run_seconds <= MAX_RUN_SECONDS:
        raise UsageError(
            f"{spelled('run_seconds')} is {options.run_seconds:g}; it must be more than 0 and at most "
            f"{MAX_RUN_SECONDS:,}"
        )
    if options.is_package and options.shapes:
        raise UsageError(f"{spelled('shapes')} is for ONNX files; the sizes of a package are in its manifest")
    if options.is_package and options.values:
        raise UsageError(f"{spelled('inputs')} is for ONNX files; a package is run on dummy tokens")
    if options.is_package and options.run_seconds is not None:
        raise UsageError(f"{spelled('run_seconds')} is for ONNX files; runs of a package have no limit")
    if options.choice.given and not options.is_package:
        raise UsageError(
            f"{spelled(options.choice.given[0])} is for folders that Partita did not write, not for a file"
        )
    for name, given in (("device", options.device is not None), ("graph_capture", options.graph_capture)):
        if given and not options.dry_run:
            raise UsageError(f"{spelled(name)} is part of a dry run; add {spelled('dry_run', True)}")
    if options.dry_run and options.where.provider is None:
        needs = f"{spelled('dry_run', True)} needs {spelled('providers', 'cuda')}, or cuda,cpu"
        raise UsageError(f"{needs}: only CUDA can be placed without its device")


def check_probe_seconds(seconds: float) -> None:
    """Raise UsageError for a budget that makes no sense."""
    if not 0 <= seconds <= MAX_PROBE_SECONDS:
        raise UsageError(
            f"{spelled('probe_seconds')} is {seconds:g}; it must be between 0, for no experiments, and "
            f"{MAX_PROBE_SECONDS:,}"
        )


def check_chain(options: PlaceOptions, chain: tuple[str, ...]) -> None:
    """Check what depends on the chain that was asked for, by ONNX Runtime's names. Raises UsageError."""
    from partita.check.limits import check_limits

    check_limits(options.limits, chain)
    if options.dry_run and chain and chain[0] != CUDA.ort_name:
        raise UsageError(
            f"{spelled('dry_run', True)} is for CUDA: {spelled('providers')} has to begin with cuda, not with "
            f"{chain[0]}"
        )
