"""The options of every verb: type, default, range and help of each, in one place.

A verb's options are a frozen dataclass. The command line is built from it (`partita.commands.build`), functions of the
Python API take its fields as arguments, and rows of prompt files and bodies of the server are checked by it. Groups of
options that verbs share are base classes. Imports nothing heavy.
"""

import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from partita.errors import UsageError
from partita.messages import as_flag, rename_options

T = TypeVar("T")

PathText: TypeAlias = str | os.PathLike[str]
Value: TypeAlias = str | int | float | bool
MAX_TOKENS = 1 << 24
MAX_THREADS = 1024
DAY_SECONDS = 86_400
WEEK_SECONDS = 7 * DAY_SECONDS
MAX_COUNT = 1 << 20
MAX_SEED = (1 << 64) - 1
MOST_BITS = 1023
"""Bits of an integer that a message can show, and that a float can hold."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that an option takes."""

    least: float = -math.inf
    most: float = math.inf
    words: str = ""
    """How a message says it; empty: from the limits."""
    above: float = -math.inf
    """Lower limit that is itself outside."""
    also: float | None = None
    """A value outside of the limits that is allowed."""

    def __contains__(self, value: float) -> bool:
        """NaN is in no range."""
        if value == self.also:
            return True
        return self.least <= value <= self.most and (value > self.above or self.above == -math.inf)

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.most == math.inf:
            return f"{self.least:,} or more"
        if self.above > -math.inf:
            return f"above {self.above:g} and at most {self.most:,}"
        return f"between {self.least:,} and {self.most:,}"


TOKENS = Range(1, MAX_TOKENS)
COUNT = Range(0)
NUMBER = Range(0, sys.float_info.max, "a number that is 0 or more")
REPORT_VIEWS = "partita.partition_reports.views"


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line and the checks know of a field. A field without one is for Python alone."""

    help: str
    flags: tuple[str, ...] = ()
    """Default: `--name`, or `--no-name` for a switch that is on, and `short`."""
    short: str | None = None
    metavar: str | None = None
    """Default for a path: FILE."""
    range: Range | None = None
    choices: tuple[str, ...] = ()
    complete: str = ""
    """Function of `partita.commands.completion` that completes the value. Default: `choices`."""
    text: str = ""
    """Parser of `partita.commands.build` for the text of the command line. Default: by type."""
    positional: bool = False
    argument: str = ""
    """Name of the Python argument, where the field has another."""
    views: str = ""
    """Folder of the views that `--view` names."""


@dataclass(frozen=True, slots=True)
class SamplingOption(Option):
    """An option that decides which token comes next."""

    off: float | None = None
    """The value that changes nothing."""
    suggested: float | None = None
    """What transformers' `generate` uses where a checkpoint samples and says nothing."""
    drawn: bool = True
    """Greedy decoding does not use it."""


def option(help: str, *, default: Any = None, **settings: Any) -> Any:
    """A field with an `Option` of these settings. A type that several classes share is Annotated with one instead."""
    return field(default=default, metadata={"option": Option(help, **settings)})


def sampling_option(help: str, **settings: Any) -> Any:
    """A field with a `SamplingOption` of these settings."""
    return field(default=None, metadata={"option": SamplingOption(help, **settings)})


@dataclass(frozen=True, slots=True)
class Described:
    """A field of an options dataclass."""

    name: str
    type: Any
    """Without None."""
    optional: bool
    """None is allowed."""
    option: Option
    field: Field[Any]

    @property
    def argument(self) -> str:
        """Name in messages."""
        return self.option.argument or self.name

    @property
    def flag(self) -> str:
        """Name on the command line, of a switch that is on by default without `no-`."""
        own = next((flag for flag in self.option.flags if not flag.startswith("--no-")), None)
        return own or f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether it holds several values, each given by its own option."""
        return get_origin(self.type) in (Sequence, Mapping)

    @property
    def is_path(self) -> bool:
        """Whether it names a file or folder."""
        return bool(self.type == PathText)


_DESCRIBED: dict[type[Any], tuple[Described, ...]] = {}
"""By dataclass."""


def described(cls: type[Any]) -> tuple[Described, ...]:
    """The options of a dataclass, in their order, without the fields that have no `Option`."""
    if cls not in _DESCRIBED:
        _DESCRIBED[cls] = tuple(_descriptions(cls))
    return _DESCRIBED[cls]


def _descriptions(cls: type[Any]) -> Iterator[Described]:
    hints = get_type_hints(cls, include_extras=True)
    for each in fields(cls):
        hint, found = hints[each.name], each.metadata.get("option")
        if get_origin(hint) is Annotated:
            hint, found = get_args(hint)
        if isinstance(found, Option):
            yield _describe(each, hint, found)


def _describe(field: Field[Any], hint: Any, option: Option) -> Described:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    given = tuple(part for part in parts if part is not NoneType)
    return Described(field.name, given[0] if len(given) == 1 else Union[given], NoneType in parts, option, field)  # noqa: UP007


@functools.cache
def option_flags() -> Mapping[str, str]:
    """Flag of the command line by the name of the argument, of every option of every verb."""
    groups = [each for each in globals().values() if isinstance(each, type) and is_dataclass(each)]
    return {each.argument: each.flag for cls in groups for each in described(cls) if not each.option.positional}


def with_flags(text: str) -> str:
    """A message with its options as flags: `--max-length 5` for `` `max_length=5` ``. Words of this process's command
    line stay as they are.
    """
    if "`" not in text:
        return text
    typed = (part for word in sys.argv for part in (word, word.partition("=")[2]))
    return rename_options(text, option_flags(), as_flag, typed)


def checked(options: T) -> T:
    """The options with paths as Path, sequences as tuples and mappings as dicts.

    Raises UsageError, which names the option, for a value of another type or out of range.
    """
    changed = {}
    cls: Any = type(options)
    for each in described(cls):
        value = getattr(options, each.name)
        if value is None and each.optional:
            continue
        found = _checked(each, value)
        if found is not value:
            changed[each.name] = found
    return replace(options, **changed) if changed else options  # type: ignore[type-var]


def check_value(cls: type[Any], name: str, value: Any) -> None:
    """Raise UsageError for a value that an option of a dataclass does not take."""
    each = next(each for each in described(cls) if each.name == name)
    if value is not None or not each.optional:
        _checked(each, value)


def _checked(each: Described, value: Any) -> Any:
    """The value of one option as the code behind it takes it. Raises UsageError."""
    if each.is_path:
        return _typed(each, value, (str, os.PathLike), "a path", Path)
    if each.several:
        return _several(each, value)
    if each.type is bool:
        return _typed(each, value, bool, "True or False")
    if each.type is str:
        found = _typed(each, value, str, "a string")
        return _chosen(each, found)
    if each.type not in (int, float):
        return value
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UsageError(f"`{each.argument}` is an integer of more than 300 digits, which no option takes")
    if isinstance(value, bool) or not isinstance(value, int if each.type is int else (int, float)):
        kind = "an integer" if each.type is int else "a number"
        raise UsageError(f"`{each.argument}` is {value!r}; it must be {kind}")
    if each.option.range is not None and value not in each.option.range:
        raise UsageError(f"`{each.argument}` is {value}; it must be {each.option.range}")
    return value


def _typed(each: Described, value: Any, kind: Any, words: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """The value, converted unless it is so already. Raises UsageError where it is of another type."""
    if not isinstance(value, kind):
        raise UsageError(f"`{each.argument}` is {value!r}; it must be {words}")
    return value if convert is None or isinstance(value, convert) else convert(value)  # type: ignore[arg-type]


def _several(each: Described, value: Any) -> Any:
    if get_origin(each.type) is Mapping:
        return _typed(each, value, Mapping, "a mapping", dict)
    if isinstance(value, (str, bytes)):
        raise UsageError(f"`{each.argument}` must be a list of strings, not the string {value!r}")
    found = _typed(each, value, Sequence, "a list", tuple)
    path = get_args(each.type)[0] == PathText
    return tuple(map(Path, found)) if path and not all(isinstance(entry, Path) for entry in found) else found


def _chosen(each: Described, value: str) -> str:
    choices = each.option.choices
    if choices and value not in choices:
        allowed = f"the only value is {choices[0]}" if len(choices) == 1 else f"choose one of {', '.join(choices)}"
        raise UsageError(f"`{each.argument}={value}`: {allowed}")
    return value


def path_of(given: PathText | None) -> Path | None:
    """The path of an option that may be missing."""
    return None if given is None else Path(given)


def group(options: Any, cls: type[T]) -> T:
    """The fields of `options` that a smaller dataclass has, as one of these."""
    return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})  # type: ignore[arg-type]


# --- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingValues:
    """How the next token is chosen, and how many."""

    temperature: float | None = sampling_option(
        "0 (default) always takes the most likely token; from 0.001 to 100, higher values are more random.",
        flags=("--temperature", "--temp", "-t"),
        range=Range(1e-3, 100, "0 (greedy) or from 0.001 to 100", also=0),
        off=0.0,
        suggested=1.0,
    )
    top_k: int | None = sampling_option(
        "Sample from the k most likely tokens; 0 (default) turns this off.",
        range=Range(0, words="0 (off) or more"),
        off=0,
        suggested=50,
    )
    top_p: float | None = sampling_option(
        "Sample from the most likely tokens that add up to this probability; 1 (default) turns this off.",
        range=Range(most=1, above=0, words="above 0 and at most 1 (off)"),
        off=1.0,
    )
    min_p: float | None = sampling_option(
        "Drop tokens below this fraction of the most likely token's probability; 0 (default) turns this off.",
        range=Range(0, 1, "from 0 (off) to 1"),
        off=0.0,
    )
    repetition_penalty: float | None = sampling_option(
        "From 0.01 to 100; above 1 (default) tokens that already occurred are less likely.",
        range=Range(0.01, 100, "from 0.01 to 100 (1: off)"),
        off=1.0,
        drawn=False,
    )
    seed: int | None = option(
        "Seed of the sampler, to reproduce a run. Default: random, and printed.",
        short="-s",
        range=Range(0, MAX_SEED, "from 0 to 2**64 - 1"),
    )
    max_new_tokens: int | None = option("Maximum number of tokens to generate. Default: 128.", short="-n", range=TOKENS)

    def __post_init__(self) -> None:
        """Numbers of other libraries become Python's own."""
        for name, value in self.figures().items():
            if hasattr(value, "ndim") or not isinstance(value, (int, float, NoneType)):
                object.__setattr__(self, name, _number(value))

    def figures(self) -> dict[str, Any]:
        """The options as a dict."""
        return {each.name: getattr(self, each.name) for each in described(SamplingValues)}


@dataclass(frozen=True)
class Sampling(SamplingValues):
    """The sampling of a request. None: not given, which is greedy, or as the checkpoint suggests."""

    source: str | None = option(
        "Sample as the checkpoint's generation_config.json suggests; options given explicitly take precedence.",
        flags=("--sampling",),
        metavar="checkpoint",
        choices=("checkpoint",),
        argument="sampling",
    )

    def over(self, other: Self) -> Self:
        """This one, with the values of `other` where it has none."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(other, **given)


def _number(value: Any) -> Any:
    """A number of another library as Python's own; what is none as it is."""
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value) if hasattr(value, "__index__") else value


def sampling_options() -> Iterator[tuple[str, SamplingOption]]:
    """Name and description of every option that decides which token comes next."""
    return ((each.name, each.option) for each in described(SamplingValues) if isinstance(each.option, SamplingOption))


GREEDY = Sampling(**{name: option.off for name, option in sampling_options()})  # type: ignore[arg-type]
"""Every option off."""


# --- groups of options that verbs share -------------------------------------------------------------------------------

ProviderValues: TypeAlias = Mapping[str, Value]
Providers: TypeAlias = str | Sequence[str | tuple[str, ProviderValues]]
"""`"webgpu,cpu"`, `["webgpu", "cpu"]`, or as ONNX Runtime has them, `[("CUDAExecutionProvider", {"device_id": 1})]`."""
Chains: TypeAlias = str | Sequence[str | Sequence[str]]
"""A chain for each contender, `["webgpu,cpu", "cpu"]` or `[["webgpu", "cpu"], ["cpu"]]`; a text is a single one."""
Process: TypeAlias = Literal["auto", "this", "child"]

PackageArgument = Annotated[
    PathText,
    Option(
        "Package folder written by `partita export`, or the folder of an ONNX decoder of another exporter.",
        metavar="PACKAGE",
        positional=True,
    ),
]
ProviderOptions = Annotated[
    Mapping[str, ProviderValues] | None,
    Option(
        "Provider option, e.g. cuda.device_id=1.",
        ("--provider-option",),
        metavar="PROVIDER.NAME=VALUE",
        complete="provider_options",
        text="provider_options",
    ),
]
ProviderLibraries = Annotated[
    Mapping[str, PathText] | None,
    Option("Shared library of a plugin provider.", ("--provider-library",), metavar="NAME=PATH", text="libraries"),
]
VIEWS = "View: {names}. Default: text."
GraphCapture = Annotated[bool, Option("Record a decode step once and replay it; cuda and webgpu can.")]
PrefillChunk = Annotated[int | None, Option("Prompt tokens per run. Default: 512.", range=TOKENS)]
ProbeSeconds = Annotated[
    float,
    Option(
        "Time budget for probing nodes that fell back; 0 disables probing.",
        metavar="SECONDS",
        range=Range(0, 3600, "between 0, for no experiments, and 3,600"),
    ),
]
Adapter = Annotated[
    str | None, Option("Adapter of the package to switch on, of `export --with-adapters`.", metavar="NAME")
]
Prefix = Annotated[PathText | None, Option("Begin with a prefix of `generate --save-prefix`, without prefill.")]
Threads = Annotated[int | None, Option("Intra-op threads. Default: one per usable core.", range=Range(1, MAX_THREADS))]
DryRun = Annotated[bool, Option("Place on CUDA without a GPU; needs --provider cuda or cuda,cpu.")]
Device = Annotated[str | None, Option("GPU to simulate in the dry run, e.g. h100.", complete="devices")]
Json = Annotated[bool, Option("Print one JSON object to stdout instead of text.", ("--json",))]
Out = Annotated[PathText | None, Option("File to write to. Default: stdout.", short="-o", metavar="F")]
ReportFile = Annotated[PathText | None, Option("Write the partition report to a file.", short="-r")]
ReportArgument = Annotated[PathText, Option("Report written by `--report FILE`.", positional=True)]


@dataclass(frozen=True, kw_only=True)
class ProviderChain:
    """The execution providers of a run."""

    providers: Annotated[
        Providers | None,
        Option(
            "Execution providers in order of preference, comma-separated; no others may run a node. Default: the best "
            "usable one, then cpu.",
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
        complete="pins",
    )
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class ForeignFolder:
    """What the user says of a folder that Partita did not write."""

    variant: str | None = option(
        "Model of a folder that Partita did not write: q4, fp16 or a file name.", metavar="NAME"
    )
    contract: PathText | None = option(
        "Meaning of the inputs and outputs of such a folder, where it cannot be inferred.", metavar="FILE.toml"
    )
    max_length: int | None = option(
        "Maximum prompt plus output tokens for such a folder. Default: its config's, at most 4096.", range=TOKENS
    )


@dataclass(frozen=True, kw_only=True)
class PlacementLimits:
    """Limits on where nodes run and what is copied."""

    max_cpu_nodes: int | None = option("Fail if more nodes than this run on the CPU provider.", range=COUNT)
    max_copies: int | None = option("Fail if a step has more Memcpy nodes than this.", range=COUNT)
    max_copy_bytes_per_token: int | None = option("Fail if a decode step copies more bytes than this.", range=COUNT)


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


# --- verbs that inspect, check and measure ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProvidersOptions:
    """Which execution providers run on this machine."""

    provider_libraries: ProviderLibraries = None


@dataclass(frozen=True, kw_only=True)
class ProvidersCommand(ProvidersOptions):
    """Show which execution providers run on this machine, and why the others do not."""

    view: str | None = option(VIEWS, metavar="NAME", views="partita.machine.views")
    out: Out = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ForeignFolder):
    """What a package, folder or ONNX file holds."""

    package: Annotated[
        PathText, Option("Package folder, folder of ONNX files, or an ONNX file.", metavar="PACKAGE", positional=True)
    ] = field(kw_only=False)
    against: PathText | None = option("Show the differences of this one.", metavar="PACKAGE")
    against_variant: str | None = option("As --variant, of the folder after --against.", metavar="NAME")
    against_contract: PathText | None = option("As --contract, of the folder after --against.", metavar="FILE.toml")
    hashes: bool = option(
        "Compute the SHA-256 of files for which no manifest and no hub snapshot has one.", default=False
    )


@dataclass(frozen=True, kw_only=True)
class InspectCommand(InspectOptions):
    """Show what a package holds, without running it: graphs, contract, cache, weights, precision, provenance."""

    view: str | None = option(VIEWS, metavar="NAME", views="partita.inspection.views")
    out: Out = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ForeignFolder, ProviderChain, PackageOptions):
    """Whether a package computes what its model computes."""

    reference: str | None = option(
        "Original model, a folder or a hub id, to compare a folder with that has no known answer.",
        metavar="CHECKPOINT",
        text="not_empty",
    )


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(VerifyOptions):
    """Replay the known answer of a package on a provider, without torch. Exit code 4 when it disagrees."""

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ProviderChain, PackageOptions):
    """Measure what rounding costs a package (all but plain fp32) on a provider, without torch: perplexity beside its
    original's.
    """

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a placement."""

    model: Annotated[
        PathText,
        Option(
            "An ONNX file, a package folder written by `partita export`, or the folder of an ONNX decoder that "
            "another exporter wrote.",
            metavar="MODEL",
            positional=True,
        ),
    ] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(ForeignFolder, PlacementLimits, ProviderChain, ModelOptions):
    """Where the nodes of a model run."""

    shapes: Mapping[str, int | Sequence[int]] | None = option(
        "Shape of an input (x=1,3,224,224) or value of a symbolic dimension (batch=1).",
        flags=("--shape",),
        metavar="NAME=SIZES",
        text="shapes",
    )
    inputs: Mapping[str, PathText] | None = option(
        "Values of an input; the others are generated.", flags=("--input",), metavar="NAME=FILE.npy", text="inputs"
    )
    runs: int = option("Session runs per phase.", default=3, range=Range(1, 1000))
    dry_run: DryRun = False
    device: Device = None
    graph_capture: bool = option("In a dry run: report whether CUDA graphs could be captured.", default=False)
    run_seconds: float | None = option(
        "Time limit for the runs of an ONNX file. Default: 120.",
        metavar="SECONDS",
        range=Range(most=DAY_SECONDS, above=0),
    )
    probe_seconds: ProbeSeconds = 120.0
    process: Process = "auto"


@dataclass(frozen=True, kw_only=True)
class PlaceCommand(PlaceOptions):
    """Show where the nodes of any ONNX model would run, what is copied, and why; without generating."""

    report: ReportFile = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class SupportOptions:
    """Which operators a provider supports."""

    operators: Annotated[
        str | Sequence[str] | None,
        Option(
            "Operators (Cast, com.microsoft:MatMulNBits) or an ONNX file; `diff A B` compares two tables that --out "
            "wrote.",
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
        ),
    ] = field(default=None, kw_only=False)
    model: PathText | None = option("Only what this ONNX file needs.")
    provider_options: ProviderOptions = None
    provider_libraries: ProviderLibraries = None
    dry_run: bool = option("Test CUDA without a GPU; needs --provider cuda.", default=False)
    device: Device = None
    seconds: float = option(
        "Time budget; variants not reached are listed as untried.",
        default=300.0,
        range=Range(most=DAY_SECONDS, above=0),
    )


@dataclass(frozen=True, kw_only=True)
class SupportCommand(SupportOptions):
    """Measure which operators a provider supports: opset versions, types, attribute and input variants."""

    everything: bool = option(
        "Every operator of ONNX and of ONNX Runtime.", default=False, flags=("--all",), argument="all"
    )
    out: PathText | None = option("Write the table to a file as JSON, for `support diff`; - is stdout.")
    markdown: PathText | None = option("Write the table to a file as Markdown; - is stdout.")
    html: PathText | None = option("Write the table to a file as one HTML page; - is stdout.")
    view: str | None = option(VIEWS, metavar="NAME", views="partita.support.views")
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ForeignFolder, PackageOptions):
    """What a benchmark measures."""

    prompt: Annotated[
        str | Sequence[int] | None,
        Option("The prompt; - reads it from stdin. Default: generated tokens.", ("--prompt", "-p")),
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
        ),
    ] = field(default=None, kw_only=False)
    against: Sequence[PathText] = option(
        "Another package of the same model to compare with; can be repeated.", default=(), metavar="PACKAGE"
    )
    baseline: str | None = option(
        "Chain that ratios are relative to, with PACKAGE. Default: cpu, else the first chain.",
        metavar="CHAIN",
        complete="chains",
    )
    prompt_tokens: int | None = option("Length of a generated prompt. Default: 64.", range=TOKENS)
    max_new_tokens: int = option(
        "Tokens to generate, greedily; at least 2.", default=32, short="-n", range=Range(2, MAX_TOKENS)
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
        range=Range(most=MAX_TOKENS, above=0, words="above 0"),
    )
    reports: PathText | None = option(
        "Write the partition report of each contender to this folder.", flags=("--report", "-r"), metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class BenchCommand(BenchOptions):
    """Benchmark one prompt on several providers, interleaved: medians, ratios, whether the tokens are the same, and
    where the time goes. Exit code 3 when a provider could not run; the others are measured all the same.
    """

    more: Sequence[str] = option(
        "Additional chains, as positional arguments after --provider.",
        default=(),
        metavar="CHAIN",
        complete="chains",
        positional=True,
    )
    token_ids: bool = option("--prompt is token ids, e.g. 1,45,7.", default=False)
    out: PathText | None = option("Write the result as JSON, for report show and report html; - is stdout.", short="-o")
    as_json: Json = False


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Show a report: what happened and what to do about it, then the tables behind it."""

    file: Annotated[PathText, Option("Report written by `generate --report`.", positional=True)]
    view: str | None = option(VIEWS, metavar="NAME", views=REPORT_VIEWS)
    out: Out = None
    brief: bool = option("At most ten lines; short for --view brief.", default=False)
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class HtmlCommand:
    """Write a report as one HTML page that works offline."""

    file: ReportArgument
    out: PathText | None = option(
        "File for the page; - is stdout. Default: FILE with the suffix .html.", short="-o", metavar="PAGE"
    )


@dataclass(frozen=True, kw_only=True)
class MarkdownCommand:
    """Write a report as Markdown, for CI job summaries and pull request comments: the answer first, the rest folded."""

    file: ReportArgument
    out: Out = None


@dataclass(frozen=True, kw_only=True)
class TraceCommand:
    """Write the observed runs as a trace for Perfetto or chrome://tracing: every node, on its provider's track."""

    file: ReportArgument
    out: Out = None


@dataclass(frozen=True, kw_only=True)
class ExplainCommand:
    """Show everything known about one node: where it ran, why, every experiment, what it costs. A node that was
    removed by fusion is explained through the one that replaced it. An ambiguous part lists the matches; exit code 2.
    """

    file: ReportArgument
    node: Annotated[str, Option("Node name, or any unique part of it.", metavar="NODE", positional=True)]
    view: str | None = option(VIEWS, metavar="NAME", views="partita.explain.views")
    out: Out = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class DiffCommand:
    """Show what changed in B: nodes moved, added or removed, reasons, copies, versions, and the cost."""

    before: Annotated[PathText, Option("The earlier report.", metavar="A", positional=True)]
    after: Annotated[PathText, Option("The later report.", metavar="B", positional=True)]
    force: bool = option("Compare reports of different models (otherwise an error, exit code 1).", default=False)
    exit_code: bool = option(
        "Exit code 1 if nodes, reasons or copies differ, like git diff --exit-code; versions and times are ignored.",
        default=False,
    )
    view: str | None = option(VIEWS, metavar="NAME", views="partita.diff.views")
    out: Out = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PlacementLimits):
    """What is required of a report."""

    max_unexplained: int | None = option("Maximum number of fallbacks without a reason, in any phase.", range=COUNT)
    cache_in_place: bool = option(
        "Require every cache state to stay in one buffer.", default=False, flags=("--require-cache-in-place",)
    )
    min_tokens_per_second: float | None = option("Minimum decode speed.", range=NUMBER)
    require: Sequence[str] = option(
        "FIELD OP VALUE, comma-separated; all have to hold in every phase; can be repeated. Nodes: phase, op, "
        "module, provider, reason (= or !=). Numbers: nodes, share, time_share of those nodes; partitions, copies, "
        "copy_bytes_per_token, tokens_per_second, p50_ms of a phase; cpu_nodes, memcpy_nodes, copy_bytes, "
        "unavailable, unexplained, cache_in_place, decode_tokens_per_second of the report; with --baseline "
        "nodes_left, new_reasons, more_copies, more_copy_bytes, lost_phases, lost_cache, wanted_other, slowdown "
        "(= != < <= > >=).",
        default=(),
        metavar="CONDITIONS",
    )
    max_slowdown: float | None = option(
        "With --baseline: 0.1 allows 10 % more time per token. Default: no limit.", range=NUMBER
    )


@dataclass(frozen=True, kw_only=True)
class CheckCommand(CheckOptions):
    """Check a report against limits, for CI. Exit code 5 with one line per failed requirement."""

    file: ReportArgument
    baseline: PathText | None = option(
        "Baseline report: fail on nodes moved off their provider, new reasons, copies or copied bytes.", metavar="A"
    )
    view: str | None = option(VIEWS, metavar="NAME", views="partita.check.views")
    out: Out = None
    as_json: Json = False


# --- export -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The provider that a package is built for."""

    target: str | None = option(
        "Provider to build the package for: it is queried for the attention lowering it supports best. Default: "
        "the best usable one.",
        metavar="PROVIDER",
        complete="providers",
    )
    target_default: bool = option(
        "If the target cannot be queried here, use the default lowering for that provider.", default=False
    )
    target_options: Mapping[str, Value | ProviderValues] | None = option(
        "Provider option, e.g. cuda.device_id=1.",
        flags=("--provider-option",),
        metavar="PROVIDER.NAME=VALUE",
        complete="provider_options",
        text="provider_options",
    )
    """Options of the target, by name; or by provider, then by name."""
    target_libraries: ProviderLibraries = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TargetOptions):
    """What to export, and how. Sizes in tokens."""

    checkpoint: Annotated[
        PathText,
        Option(
            "Checkpoint folder, or a hub id such as owner/name.",
            metavar="CHECKPOINT",
            positional=True,
            text="not_empty",
        ),
    ] = field(kw_only=False)
    out: Annotated[PathText, Option("Folder to write the package to.", metavar="OUT", positional=True)] = field(
        kw_only=False
    )
    precision: str = option(
        "Data type of weights, cache and arithmetic: fp32, fp16 or bf16; int8 or int4 for weights quantised in "
        "blocks, computed in fp32. auto is fp32, or the stored precision of a quantised checkpoint.",
        default="auto",
        complete="precisions",
    )
    block_size: int | None = option(
        "int8, int4: weights that share a scale, 32, 64 or 128. Default: the target's, 64 for int4 on cpu."
    )
    activations: str | None = option(
        "Data type that weights of 16 bits or less are multiplied with: fp32; fp16 or bf16, also for the cache; "
        "int8, quantised per token, with --precision int8. Default: what the target has a kernel for.",
        complete="activations",
    )
    prefill_precision: str | None = option(
        "int8, int4: a second graph for prefill with 8-bit weights and activations quantised per token, for "
        "processors with fast integer products.",
        complete="prefill_precisions",
    )
    requantise: bool = option(
        "int8, int4: quantise the weights of a quantised checkpoint again, where they cannot be kept as they are "
        "stored.",
        default=False,
    )
    keep: Mapping[str, str] | None = option(
        "int8, int4: modules with another weight precision, e.g. lm_head=int8,layers.0=fp16.",
        metavar="MODULE=PRECISION,...",
        text="pairs",
    )
    quantiser: str | None = option(
        "int8, int4: method that quantises the weights: {names}. Default: refit, or gptq with --calibrate.",
        complete="quantisers",
    )
    calibrate: PathText | None = option(
        "int8, int4: UTF-8 text that the weights are quantised on; another than that of --quality-text."
    )
    max_perplexity_ratio: float | None = option(
        "int8, int4: keep the perplexity within this ratio of the original (e.g. 1.01) by raising the precision of "
        "as few weights as possible.",
        range=Range(most=10, above=1, words="above 1, which is no loss, and at most 10"),
    )
    max_weight_size: int | None = option(
        "int8, int4: size budget (e.g. 600MiB or 2GiB), spent on the most sensitive weights.",
        metavar="SIZE",
        text="size",
        range=Range(1, words="a number of bytes"),
    )
    quality_text: PathText | None = option(
        "int8, int4: UTF-8 text on which the package is compared with the original model. Default: the text that "
        "ships with Partita."
    )
    max_length: int | None = option(
        "Cache length N: maximum number of prompt and generated tokens together. Default: the model's, up to 2048.",
        range=Range(2, MAX_TOKENS),
    )
    cache: str = option(
        "Layout of the cache: fixed, one buffer that is written in place; window, the same, with only the window "
        "in layers of sliding-window attention; growing, as optimum has it, for its ORTModelForCausalLM.",
        default="fixed",
        choices=("fixed", "window", "growing"),
    )
    cache_precision: str | None = option(
        "int8: cache keys and values as integers, with scales from a text: that of --calibrate, else that of "
        "--quality-text. Default: the type of the activations.",
        complete="cache_precisions",
    )
    batch_size: int = option("Batch size, fixed in the graph.", default=1, range=TOKENS)
    attention: str = option(
        "Lowering of attention and cache: {names}; auto queries the target.", default="auto", complete="attentions"
    )
    static_shapes: bool = option("Write prefill.onnx and decode.onnx with static shapes only.", default=False)
    prefill_chunk: int | None = option(
        "Tokens per run of the static prefill.onnx. Default: 128, or 16 with recurrent states.", range=TOKENS
    )
    verify: bool = option(
        "Skip the comparison with the original model; the package is marked unverified.", default=True
    )
    verify_length: int | None = option(
        "Longest sliding window, attention chunk or original context that verification crosses, in tokens. "
        "Default: 1,024.",
        range=TOKENS,
    )
    force: bool = option("Replace an existing package.", default=False, short="-f")
    adapter: PathText | None = option("PEFT adapter, LoRA or DoRA, to merge into the weights.", metavar="FOLDER")
    with_adapters: Mapping[str, PathText] | None = option(
        "PEFT adapter, LoRA, to put beside the weights, for `generate --adapter NAME`; repeatable.",
        metavar="NAME=FOLDER",
        text="folders",
    )
    opset: int | None = option("ONNX opset. Default: the one that the attention lowering needs.")
    exporter: str = option("Exporter to use: {names}.", default="native", complete="exporters")
    without_pass: Sequence[str] = option(
        "Leave out a pass over the graph, to see its effect; repeatable. --explain lists them.",
        default=(),
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ExportOptions):
    """Export a checkpoint to a package and check it against the original model."""

    explain: bool = option("Also print what each pass over the graph does and how often it did it.", default=False)
    as_json: Json = False


# --- verbs that generate ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding."""

    speculate: str | None = option(
        "Speculative decoding by n-gram lookup; the output does not change.", metavar="ngram", complete="speculations"
    )
    draft: PathText | None = option(
        "Speculative decoding with a smaller draft package (same tokenizer).", metavar="PACKAGE"
    )


Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, token ids, or a list of either. Arrays of token ids will do."""
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
Conversations: TypeAlias = Messages | Sequence[Messages]
"""A user's message, messages, or a list of either."""
Samplings: TypeAlias = Sampling | Sequence[Sampling] | Literal["checkpoint"]
TokenIds: TypeAlias = Sequence[int] | set[int] | frozenset[int]
AdapterNames: TypeAlias = str | Sequence[str | None]
"""The name of an adapter for all prompts, or one for each; None: without."""


@dataclass(frozen=True)
class PromptArgument:
    """The prompt of a request: a text, or token ids, also as an array."""

    prompt: str | Sequence[int]


@dataclass(frozen=True)
class PromptsArgument:
    """The prompts of a generation."""

    prompts: Prompts


@dataclass(frozen=True)
class MessagesArgument:
    """The messages of a chat."""

    messages: Conversations


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingValues, PromptArgument):
    """The arguments of `partita.request`."""

    sampling: Sampling | Literal["checkpoint"] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: TokenIds | None = None
    logprobs: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SpeculationOptions, SamplingValues):
    """What `Model.generate` and `Model.chat` have in common."""

    sampling: Samplings | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: TokenIds | None = None
    prefill_chunk: PrefillChunk = None
    adapter: AdapterNames | None = None
    prefix: PathText | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions, PromptsArgument):
    """The arguments of `Model.generate`."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions, MessagesArgument):
    """The arguments of `Model.chat`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(ForeignFolder, SpeculationOptions, Sampling, ProviderChain, PackageOptions):
    """What `partita generate` and `partita chat` have in common."""

    system: str | None = option("System message; generate applies the chat template.")
    stop: Sequence[str] = option("Stop when this text appears; can be repeated.", default=())
    prefix: Prefix = None
    prefill_chunk: PrefillChunk = None
    adapter: Adapter = None
    probe_seconds: ProbeSeconds = 120.0


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(PlacementLimits, RunOptions):
    """Generate text from a package, or from another exporter's folder. Text goes to stdout as it comes, timings to
    stderr.
    """

    prompts: Sequence[str] = option(
        "The prompt; - reads it from stdin, without a trailing newline. Several prompts take turns in the batch.",
        default=(),
        metavar="PROMPT",
        positional=True,
    )
    more_prompts: Sequence[str] = option(
        "An additional prompt, after the positional ones.", default=(), flags=("--prompt", "-p"), metavar="TEXT"
    )
    input: PathText | None = option(
        "File of prompts, a row each: .jsonl (objects with prompt, messages or tokens, an id and options of the "
        "row), .txt (a prompt per line) or .parquet; - reads .jsonl from stdin. The rows take turns in the batch.",
        short="-i",
    )
    output: PathText | None = option(
        "File for the completions of --input, .jsonl or .parquet, in the order of the rows. A run that ended early "
        "continues when it is started again.",
        short="-o",
    )
    address: str | None = option(
        "Ray cluster that processes the rows of --input: auto (the one on this machine), HOST:PORT, or local (one "
        "is started for this run).",
        metavar="ADDRESS",
    )
    workers: int | None = option(
        "Worker processes of the cluster, each with the package loaded. Default: one per GPU where the chain leads "
        "with cuda, else one per machine.",
        metavar="N",
        range=Range(1, 10_000),
    )
    chat: bool = option("Apply the tokenizer's chat template to the prompt.", default=False, short="-c")
    token_ids: bool = option("Prompts and output are token ids, e.g. '1,45,7'; needs no tokenizer.", default=False)
    save_prefix: PathText | None = option(
        "Process the prompt, or the --system message, save the cache to FILE, and generate nothing."
    )
    graph_capture: GraphCapture = False
    report: ReportFile = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ChatCommand(RunOptions):
    """Talk to a package whose tokenizer has a chat template. The cache is kept between turns; Ctrl-C ends an answer,
    Ctrl-D the session, and /help shows the commands. Without a terminal, every line of stdin is a message or a command.
    """

    resume: PathText | None = option("Go on with a conversation that /save has written.")


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ForeignFolder, SpeculationOptions, PlacementLimits, ProviderChain):
    """Serve packages over HTTP with OpenAI's API; requests join a running batch. Exit code 3 when the chain is not
    honoured.
    """

    packages: Annotated[
        Sequence[PathText],
        Option(
            "Package folders, or folders of ONNX decoders of another exporter; each is a model of the API.",
            metavar="PACKAGE...",
            positional=True,
        ),
    ]
    name: Sequence[str] = option(
        "Name of a package in the API, once for each. Default: its folder's.", default=(), metavar="MODEL"
    )
    host: str = option("Address to listen on; the default accepts clients of this machine only.", default="127.0.0.1")
    port: int = option(
        "Port to listen on; 0 for any that is free.",
        default=8000,
        range=Range(0, 65535, "between 1 and 65535, or 0 for any that is free"),
    )
    api_key: Sequence[str] = option(
        "Key that clients have to send; can be repeated. Default: that in PARTITA_API_KEY.", default=(), metavar="KEY"
    )
    allowed_origin: Sequence[str] = option(
        "Origin of web pages that may send requests, or *; can be repeated.", default=(), metavar="ORIGIN"
    )
    source: str | None = option(
        "Defaults of requests from the checkpoint's generation_config.json. Default: as in OpenAI's API, "
        "temperature 1.",
        flags=("--sampling",),
        metavar="checkpoint",
        choices=("checkpoint",),
        argument="sampling",
    )
    adapter: Adapter = None
    prefix: Sequence[PathText] = option(
        "Prefix file of `generate --save-prefix`, for prompts that begin with it; once for each package.",
        default=(),
        metavar="FILE",
    )
    prefill_chunk: PrefillChunk = None
    max_queue: int = option(
        "Maximum number of prompts of a package that wait for a slot.", default=256, range=Range(0, MAX_COUNT)
    )
    max_body: int = option(
        "Largest request body. Default: 4MiB.", default=4 << 20, metavar="SIZE", text="size", range=Range(1, 1 << 40)
    )
    timeout: float = option(
        "Time limit of a request, waiting included.", default=600.0, metavar="SECONDS", range=Range(0.001, WEEK_SECONDS)
    )
    max_requests: int = option("Maximum number of requests in progress.", default=1024, range=Range(1, MAX_COUNT))
    drain_timeout: float | None = option(
        "Grace period for running requests after SIGTERM. Default: the request timeout.",
        metavar="SECONDS",
        range=Range(0, WEEK_SECONDS),
    )
    probe_seconds: ProbeSeconds = 0.0
    as_json: Json = False
