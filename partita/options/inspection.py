"""Options of `providers`, `doctor`, `inspect`, `plan`, `verify`, `evaluate` and `bench`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from partita.options.fields import MAX_TOKENS, MODEL, TOKENS, Option, PathText, Range, option
from partita.options.groups import (
    Chains,
    ForeignFolder,
    Json,
    ModelArgument,
    PackageOptions,
    Precision,
    PrefillChunk,
    ProgressOptions,
    ProviderChain,
    ProviderLibraries,
    ProviderOptions,
    SourceOptions,
    Threads,
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

    VIEWS = "partita.machine"


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

    VIEWS = "partita.capacity.records"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ForeignFolder, PackageOptions):
    """Prompt and contenders of a benchmark."""

    HELP_GROUP = "Measurement"
    prompt: Annotated[
        str | Sequence[int] | None,
        Option("The prompt; - reads it from stdin. Default: generated tokens.", ("--prompt", "-p"), group="Input"),
    ] = field(default=None, kw_only=False)
    chains: Annotated[
        Chains | None,
        Option(
            "A chain to measure, e.g. cpu or webgpu,cpu; can be repeated, and additional chains may follow it: "
            "--providers webgpu cpu. Default: the best usable provider, then cpu.",
            ("--provider", "--providers", "-e"),
            metavar="CHAIN",
            complete="chains",
            text="list",
            group="Provider",
        ),
    ] = field(default=None, kw_only=False)
    against: Sequence[PathText] = option(
        "Another package of the same model to compare with; can be repeated.", default=(), metavar="MODEL", text=MODEL
    )
    baseline: str | None = option(
        "Chain of MODEL that ratios are relative to. Default: cpu, else the first chain.",
        metavar="CHAIN",
        complete="chains",
    )
    prompt_tokens: int | None = option("Length of a generated prompt. Default: 64.", range=TOKENS, group="Input")
    max_new_tokens: int = option(
        "Tokens to generate, greedily; at least 2.",
        default=32,
        flags=("--max-new-tokens", "--max-tokens", "-n"),
        range=Range(2, MAX_TOKENS),
    )
    prefill_chunk: PrefillChunk = None
    rounds: int = option("Measured rounds, after one warm-up round.", default=5, range=Range(1, 1000))
    provider_options: ProviderOptions = None
    provider_libraries: ProviderLibraries = None
    threads: Threads = None
    timeout_seconds: float = option(
        "Time limit for loading and for each round; a provider that exceeds it counts as failed.",
        default=600.0,
        flags=("--timeout",),
        metavar="SECONDS",
        range=Range(maximum=MAX_TOKENS, above=0, text="above 0"),
    )
    reports: PathText | None = option(
        "Write the partition report of each contender to this folder.",
        flags=("--report", "-r"),
        metavar="DIR",
        group="Output",
    )


@dataclass(frozen=True, kw_only=True)
class BenchCommand(ProgressOptions, SourceOptions, BenchOptions):
    """Benchmark one prompt on several providers, interleaved: medians, ratios, whether the tokens are the same, and
    where the time goes. Exit code 3 when a provider could not run; the others are measured anyway.
    """

    package: ModelArgument = field(kw_only=False)
    more: Sequence[str] = option(
        "Additional chains, as positional arguments after --provider.",
        default=(),
        metavar="CHAIN",
        complete="chains",
        positional=True,
    )
    token_ids: bool = option("--prompt is token ids, e.g. 1,45,7.", default=False, group="Input")
    out: PathText | None = option(
        "Write the result as JSON, for report show and report html; - is stdout.", short="-o", group="Output"
    )
    as_json: Json = False
