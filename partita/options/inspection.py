"""Options of `providers`, `doctor`, `inspect`, `plan`, `verify` and `evaluate`."""

from dataclasses import dataclass, field
from typing import Annotated

from partita.options.fields import MAX_TOKENS, MODEL, TOKENS, Option, PathText, Range, option
from partita.options.groups import (
    ForeignFolder,
    Json,
    PackageOptions,
    Precision,
    ProgressOptions,
    ProviderChain,
    ProviderLibraries,
    ViewOptions,
)


@dataclass(frozen=True, kw_only=True)
class ProvidersOptions:
    """Execution providers of this machine."""

    provider_libraries: ProviderLibraries = None
    measure: bool = option(
        "Measure the rates of this machine (memory, products, attention), for `plan` and reports.",
        default=False,
        group="Output",
    )


@dataclass(frozen=True, kw_only=True)
class ProvidersCommand(ViewOptions, ProvidersOptions):
    """Show which execution providers run on this machine, and why the others do not."""

    VIEWS = "partita.machine.document"


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Show versions, hardware, execution providers and problems of this installation, for a bug report."""

    provider_libraries: ProviderLibraries = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ForeignFolder):
    """Contents of a package, folder or ONNX file."""

    HELP_GROUP = "Comparison"
    package: Annotated[
        PathText,
        Option(
            "Package folder, model package of ONNX Runtime, folder of ONNX files, or ONNX file.",
            metavar="PACKAGE",
            positional=True,
        ),
    ] = field(kw_only=False)
    against: PathText | None = option("Package, folder or ONNX file to compare with.", metavar="PACKAGE")
    against_variant: str | None = option("--variant for the folder of --against.", metavar="NAME")
    against_contract: PathText | None = option("--contract for the folder of --against.", metavar="FILE.toml")
    hashes: bool = option(
        "Compute the SHA-256 of files that have none in a manifest or hub snapshot.",
        default=False,
        group="Output",
    )


@dataclass(frozen=True, kw_only=True)
class InspectCommand(ViewOptions, InspectOptions):
    """Show what a package holds, without running it: graphs, contract, cache, weights, precision, provenance."""

    VIEWS = "partita.inspection.document"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ForeignFolder, ProviderChain, PackageOptions):
    """Verification of a package against its source model."""

    HELP_GROUP = "Model"
    reference: str | None = option(
        "Source model (folder or hub id) to compare with, for a folder without a known answer.",
        metavar="CHECKPOINT",
        text=MODEL,
    )


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(ProgressOptions, VerifyOptions):
    """Replay the known answer of a package on a provider, without torch. Exit code 4 on a mismatch."""

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ProgressOptions, ProviderChain, PackageOptions):
    """Measure the perplexity of a package (any precision but fp32) on a provider, and compare it with the source
    model's, without torch.
    """

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Whether a model fits a device, and how fast it runs there."""

    HELP_GROUP = "Model"
    model: Annotated[
        PathText,
        Option(
            "Checkpoint folder, config.json, GGUF file, hub id, package, or folder of an ONNX decoder.",
            metavar="MODEL",
            positional=True,
            text=MODEL,
        ),
    ] = field(kw_only=False)
    device: str = option(
        "Device to plan for: here (the CPU of this machine), or a GPU, e.g. h100.",
        default="here",
        metavar="DEVICE",
        complete="devices",
    )
    precision: Precision = "auto"
    context: int | None = option(
        "Prompt plus output tokens of a row. Default: the model's, up to 2048; of a package, its cache length.",
        range=Range(2, MAX_TOKENS),
    )
    batch: int = option("Rows.", default=1, range=TOKENS)
    prompt_tokens: int | None = option("Tokens of the prompt of each row. Default: half of --context.", range=TOKENS)


@dataclass(frozen=True, kw_only=True)
class PlanCommand(ViewOptions, ProgressOptions, PlanOptions):
    """Show whether a model fits a device, the largest context and batch that fit, and its speed, without running it.
    Exit code 5 if it does not fit.
    """

    VIEWS = "partita.capacity.document"
