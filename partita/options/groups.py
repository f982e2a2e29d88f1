"""Options and groups of options that several verbs have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from partita.options.fields import COUNT, MAX_THREADS, MODEL, TOKENS, Option, PathText, Range, Value, option

PrecisionName: TypeAlias = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4"]
"""The precisions of partita.dtypes, and auto: the stored precision of a quantised checkpoint, else fp32."""
ProviderValues: TypeAlias = Mapping[str, Value]
Providers: TypeAlias = str | Sequence[str | tuple[str, ProviderValues]]
"""`"webgpu,cpu"`, `["webgpu", "cpu"]`, or as ONNX Runtime has them, `[("CUDAExecutionProvider", {"device_id": 1})]`."""
Chains: TypeAlias = str | Sequence[str | Sequence[str]]
"""A chain for each contender, `["webgpu,cpu", "cpu"]` or `[["webgpu", "cpu"], ["cpu"]]`; a text is a single one."""
Process: TypeAlias = Literal["auto", "this", "child"]
DRY_RUN = "Dry run"
"""Heading of its options in the help."""
PackageArgument = Annotated[
    PathText,
    Option(
        "Package folder written by `partita export`, or the folder of an ONNX decoder of another exporter.",
        metavar="PACKAGE",
        positional=True,
    ),
]
ModelArgument = Annotated[
    PathText,
    Option(
        "Package, folder of another exporter, checkpoint, GGUF file, or hub id (name, owner/name, "
        "owner/name@revision). A checkpoint is exported once into the cache folder.",
        metavar="MODEL",
        positional=True,
        text=MODEL,
    ),
]
Precision = Annotated[
    PrecisionName,
    Option(
        "Data type of weights, cache and arithmetic: fp32, fp16 or bf16; int8 or int4 for weights quantised in "
        "blocks, computed in fp32. auto is fp32, or the stored precision of a quantised checkpoint."
    ),
]
Revision = Annotated[
    str | None, Option("Branch, tag or commit of a model of the hub.", metavar="REV", text="not_empty", group="Model")
]
ProviderOptions = Annotated[
    Mapping[str, ProviderValues] | None,
    Option(
        "Provider option, e.g. cuda.device_id=1.",
        ("--provider-option",),
        metavar="PROVIDER.NAME=VALUE",
        text="provider_options",
        group="Provider",
    ),
]
ProviderLibraries = Annotated[
    Mapping[str, PathText] | None,
    Option(
        "Shared library of a plugin execution provider.",
        ("--provider-library",),
        metavar="NAME=PATH",
        text="libraries",
        group="Provider",
    ),
]
GraphCapture = Annotated[
    bool, Option("Record a decode step once and replay it; supported by cuda and webgpu.", group="Provider")
]
PrefillChunk = Annotated[int | None, Option("Prompt tokens per run. Default: 512.", range=TOKENS, group="Model")]
ProbeSeconds = Annotated[
    float,
    Option(
        "Time budget for probing nodes that fell back; 0 disables probing.",
        metavar="SECONDS",
        range=Range(0, 3600, "between 0 (no experiments) and 3,600"),
        group="Output",
    ),
]
Adapter = Annotated[
    str | None,
    Option("Adapter of the package to enable, one of `export --with-adapters`.", metavar="NAME", group="Model"),
]
Prefix = Annotated[
    PathText | None, Option("Start from a prefix of `generate --save-prefix`, without prefill.", group="Input")
]
Threads = Annotated[
    int | None,
    Option("Intra-op threads. Default: one per usable core.", range=Range(1, MAX_THREADS), group="Provider"),
]
DryRun = Annotated[bool, Option("Place on CUDA without a GPU; needs --provider cuda or cuda,cpu.", group=DRY_RUN)]
Device = Annotated[
    str | None,
    Option("GPU to simulate in the dry run, e.g. h100.", metavar="GPU", group=DRY_RUN),
]
Json = Annotated[bool, Option("Print one JSON object to stdout instead of text.", ("--json",), group="Output")]
Out = Annotated[PathText | None, Option("File to write to. Default: stdout.", short="-o", metavar="F", group="Output")]
ReportFile = Annotated[PathText | None, Option("Write the partition report to a file.", short="-r", group="Output")]
ReportArgument = Annotated[PathText, Option("Report written by `--report FILE`.", positional=True)]


@dataclass(frozen=True, kw_only=True)
class ProviderChain:
    """The execution providers of a run."""

    HELP_GROUP = "Provider"
    providers: Annotated[
        Providers | None,
        Option(
            "Execution providers in order of preference, comma-separated; nodes run only on these. "
            "Default: the best usable one, then cpu.",
            ("--provider", "-e"),
            metavar="CHAIN",
            complete="chains",
        ),
    ] = field(default=None, kw_only=False)
    provider_options: ProviderOptions = None
    provider_libraries: ProviderLibraries = None
    pins: Sequence[str] = option(
        "Pin a module to a provider: cpu:lm_head or webgpu:layers.0-11.",
        default=(),
        flags=("--pin",),
        metavar="PROVIDER:MODULE",
    )
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class ForeignFolder:
    """Options for a folder that another exporter wrote."""

    HELP_GROUP = "Model"
    variant: str | None = option(
        "Model to use in a folder of another exporter (q4, fp16 or a file name), or variant of a model package.",
        metavar="NAME",
    )
    contract: PathText | None = option(
        "Meaning of the inputs and outputs of another exporter's model, where it cannot be inferred.",
        metavar="FILE.toml",
    )
    max_length: int | None = option(
        "Maximum prompt plus output tokens of another exporter's model. Default: its config's, at most 4096.",
        range=TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Export of a model that is not a package."""

    HELP_GROUP = "Model"

    precision: Precision = "auto"
    revision: Revision = None


@dataclass(frozen=True, kw_only=True)
class PlacementLimits:
    """Limits on where nodes run and what is copied."""

    HELP_GROUP = "Limits"
    max_cpu_nodes: int | None = option("Fail if more nodes than this run on the CPU provider.", range=COUNT)
    max_copies: int | None = option("Fail if a step has more Memcpy nodes than this.", range=COUNT)
    max_copy_bytes_per_token: int | None = option("Fail if a decode step copies more bytes than this.", range=COUNT)
    max_slow_nodes: int | None = option("Fail if more nodes than this take a slow kernel path.", range=COUNT)


@dataclass(frozen=True, kw_only=True)
class ProgressOptions:
    """Progress output on stderr."""

    HELP_GROUP = "Output"
    quiet: bool = option("Print results only: no progress, no summary.", default=False, short="-q")
    verbose: bool = option("Print a line with the duration of every stage.", default=False, short="-v")


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """View of a result, and its file."""

    HELP_GROUP = "Output"
    VIEWS = ""
    """Module with the views."""
    view: str | None = option("View. Default: by the suffix of --out, else text.", complete="views")
    out: Out = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """The package of a run."""

    package: PackageArgument = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ForeignFolder, ProviderChain, PackageOptions):
    """Open a package, or a folder of another exporter, on these providers and no others."""

    graph_capture: GraphCapture = False
    observe: bool = True
    """Profile the first runs, which a report needs."""
    process: Process = "auto"
