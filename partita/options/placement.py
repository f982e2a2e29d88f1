"""Options of `place`, `support` and `drift`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from partita.options.fields import DAY_SECONDS, Option, PathText, Range, option
from partita.options.groups import (
    DRY_RUN,
    Device,
    DryRun,
    ForeignFolder,
    Json,
    PlacementLimits,
    ProbeSeconds,
    Process,
    ProgressOptions,
    ProviderChain,
    ProviderLibraries,
    ProviderOptions,
    ReportFile,
    ViewOptions,
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a placement, and its inputs."""

    HELP_GROUP = "Input"
    model: Annotated[
        PathText,
        Option(
            "ONNX file, package folder written by `partita export`, folder of an ONNX decoder of another exporter, or "
            "model package of ONNX Runtime.",
            metavar="MODEL",
            positional=True,
        ),
    ] = field(kw_only=False)
    shapes: Mapping[str, int | Sequence[int]] | None = option(
        "Shape of an input of an ONNX file (x=1,3,224,224) or value of a symbolic dimension (batch=1).",
        flags=("--shape",),
        metavar="NAME=SIZES",
        text="shapes",
    )
    inputs: Mapping[str, PathText] | None = option(
        "Values of an input of an ONNX file. Default: generated values.",
        flags=("--input",),
        metavar="NAME=FILE.npy",
        text="inputs",
    )


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(ForeignFolder, PlacementLimits, ProviderChain, ModelOptions):
    """Model, inputs and experiments of a placement."""

    HELP_GROUP = "Input"
    runs: int = option("Session runs per phase.", default=3, range=Range(1, 1000), group="Measurement")
    dry_run: DryRun = False
    device: Device = None
    run_seconds: float | None = option(
        "Time limit for the runs of an ONNX file. Default: 120.",
        metavar="SECONDS",
        range=Range(maximum=DAY_SECONDS, above=0),
        group="Measurement",
    )
    probe_seconds: ProbeSeconds = 120.0
    process: Process = "auto"


@dataclass(frozen=True, kw_only=True)
class PlaceCommand(ProgressOptions, PlaceOptions):
    """Show where the nodes of any ONNX model would run, what is copied, and why; without generating."""

    report: ReportFile = None
    full: bool = option("All tables.", default=False, group="Output")
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class SupportOptions:
    """Operators and provider of a support table."""

    HELP_GROUP = "Input"
    operators: Annotated[
        str | Sequence[str] | None,
        Option(
            "Operators (Cast, com.microsoft:MatMulNBits) or an ONNX file.",
            metavar="OP|MODEL",
            positional=True,
            text="list",
        ),
    ] = field(default=None, kw_only=False)
    provider: Annotated[
        str | None,
        Option(
            "Provider to test. Default: the best usable one.",
            ("--provider", "-e"),
            metavar="NAME",
            complete="providers",
            group="Provider",
        ),
    ] = field(default=None, kw_only=False)
    model: PathText | None = option("Only the operators of this ONNX file.")
    provider_options: ProviderOptions = None
    provider_libraries: ProviderLibraries = None
    dry_run: bool = option("Test CUDA without a GPU; needs --provider cuda.", default=False, group=DRY_RUN)
    device: Device = None
    seconds: float = option(
        "Time budget; variants not reached are listed as untested.",
        default=300.0,
        range=Range(maximum=DAY_SECONDS, above=0),
        group="Measurement",
    )


@dataclass(frozen=True, kw_only=True)
class SupportCommand(ViewOptions, ProgressOptions, SupportOptions):
    """Measure which operators a provider supports: opset versions, types, attribute and input variants."""

    HELP_GROUP = "Output"
    VIEWS = "partita.support.sections"
    everything: bool = option(
        "All operators of ONNX and of ONNX Runtime.", default=False, flags=("--all",), argument="all", group="Input"
    )


@dataclass(frozen=True, kw_only=True)
class DriftOptions(ForeignFolder, ProviderChain, ModelOptions):
    """Where the outputs of a model on one provider differ from those on another."""

    HELP_GROUP = "Comparison"
    against: str | None = option(
        "Reference: a provider chain; a virtual environment with another ONNX Runtime; original or a checkpoint for "
        "the source model. Default: cpu.",
        metavar="CHAIN|VENV|CHECKPOINT",
    )
    by: Literal["layer", "node"] = option(
        "Compare layers, then the nodes of the first layer over tolerance; or all nodes.", default="layer"
    )
    tolerance: float | None = option(
        "Largest relative error. Default: by element type, 1e-4 for float32, 2e-2 for float16.",
        range=Range(maximum=1.0, above=0),
    )
    free_running: bool = option(
        "Let the tested side read the states of its own steps, so that errors add up.", default=False
    )
    process: Process = "auto"


@dataclass(frozen=True, kw_only=True)
class DriftCommand(ViewOptions, ProgressOptions, DriftOptions):
    """Find the layer and node whose output on a provider differs from the reference. Exit code 4 on a difference."""

    VIEWS = "partita.drift.records"
