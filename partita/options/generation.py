"""Options of sampling, of `generate`, `chat` and `serve`, and of the functions that generate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

from partita.options.fields import (
    MAX_COUNT,
    MAX_SEED,
    MODEL,
    TOKENS,
    WEEK_SECONDS,
    Option,
    PathText,
    Range,
    describe_fields,
    group,
    option,
)
from partita.options.groups import (
    Adapter,
    ForeignFolder,
    GraphCapture,
    Json,
    ModelArgument,
    PlacementLimits,
    PrefillChunk,
    Prefix,
    ProbeSeconds,
    ProgressOptions,
    ProviderChain,
    ReportFile,
    SourceOptions,
)


@dataclass(frozen=True, kw_only=True)
class SamplingValues:
    """Sampling options and the maximum number of new tokens."""

    HELP_GROUP = "Sampling"
    temperature: float | None = option(
        "0 (default) always takes the most likely token; from 0.001 to 100, higher values are more random.",
        flags=("--temperature", "--temp", "-t"),
        range=Range(1e-3, 100, "0 (greedy) or from 0.001 to 100", extra_value=0),
        off_value=0.0,
        suggested=1.0,
    )
    top_k: int | None = option(
        "Sample from the k most likely tokens; 0 (default) turns this off.",
        range=Range(0, text="0 (off) or more"),
        off_value=0,
        suggested=50,
    )
    top_p: float | None = option(
        "Sample from the most likely tokens that add up to this probability; 1 (default) turns this off.",
        range=Range(maximum=1, above=0, text="above 0 and at most 1 (off)"),
        off_value=1.0,
    )
    min_p: float | None = option(
        "Drop tokens below this fraction of the probability of the most likely token; 0 (default) turns this off.",
        range=Range(0, 1, "from 0 (off) to 1"),
        off_value=0.0,
    )
    repetition_penalty: float | None = option(
        "From 0.01 to 100; above 1, tokens that already occurred are less likely. Default: 1 (off).",
        range=Range(0.01, 100, "from 0.01 to 100 (1: off)"),
        off_value=1.0,
        sampling_only=False,
    )
    seed: int | None = option(
        "Seed of the sampler, to reproduce a run. Default: random, and printed.",
        short="-s",
        range=Range(0, MAX_SEED, "from 0 to 2**64 - 1"),
    )
    max_new_tokens: int | None = option(
        "Maximum number of tokens to generate. Default: 128.",
        flags=("--max-new-tokens", "--max-tokens", "-n"),
        range=TOKENS,
    )

    def figures(self) -> dict[str, Any]:
        """The options as a dict."""
        return {each.name: getattr(self, each.name) for each in describe_fields(SamplingValues)}


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingValues):
    """Sampling of a request. None: not set; then greedy, or the checkpoint's generation_config.json."""

    HELP_GROUP = "Sampling"
    source: str | None = option(
        "Sample as in the checkpoint's generation_config.json; explicit options take precedence.",
        flags=("--sampling",),
        choices=("checkpoint",),
        argument="sampling",
    )

    def with_defaults(self, other: Self) -> Self:
        """These options, with those of `other` that are not set here."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(other, **given)


def sampling_options() -> Iterator[tuple[str, Option]]:
    """Name and description of every sampling option."""
    return ((each.name, each) for each in describe_fields(SamplingValues) if each.off_value is not None)


GREEDY = Sampling(**{name: option.off_value for name, option in sampling_options()})  # type: ignore[arg-type]
"""Every option off."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding. At most one of the two fields is set."""

    HELP_GROUP = "Speculative decoding"
    speculate: Literal["ngram"] | None = option("Speculative decoding by n-gram lookup; the output does not change.")
    draft: PathText | None = option(
        "Speculative decoding with a smaller draft package (same tokenizer).", metavar="PACKAGE"
    )

    def speculation_texts(self) -> dict[str, str]:
        """The options that are set, as a report shows them."""
        given = {"speculate": self.speculate, "draft": self.draft}
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class BatchOptions(SpeculationOptions):
    """Options that all requests of a batch share."""

    prefill_chunk: PrefillChunk = None
    adapter: Adapter = None
    prefix: Prefix = None


Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, token ids, or a list of either. Token ids may be arrays."""
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
Conversations: TypeAlias = Messages | Sequence[Messages]
"""A user's message, messages, or a list of either."""
Samplings: TypeAlias = Sampling | Sequence[Sampling] | Literal["checkpoint"]
TokenIds: TypeAlias = Sequence[int] | set[int] | frozenset[int]
AdapterNames: TypeAlias = str | Sequence[str | None]
"""The name of an adapter for all prompts, or one for each; None: without."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingValues):
    """The arguments of `partita.request`. The prompt: a text, or token ids, also as an array."""

    prompt: str | Sequence[int] = field(kw_only=False)
    sampling: Sampling | Literal["checkpoint"] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: TokenIds | None = None
    logprobs: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(BatchOptions, SamplingValues):
    """Options of both `Model.generate` and `Model.chat`."""

    sampling: Samplings | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: TokenIds | None = None
    adapter: AdapterNames | None = None  # type: ignore[assignment] # also one for each prompt


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """The arguments of `Model.generate`."""

    prompts: Prompts = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    """The arguments of `Model.chat`."""

    messages: Conversations = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ProgressOptions, ForeignFolder, BatchOptions, Sampling, ProviderChain, SourceOptions):
    """Options of `partita run`, `generate` and `chat`."""

    HELP_GROUP = "Input"
    package: ModelArgument
    system: str | None = option("System message; the prompt then goes through the chat template.", metavar="TEXT")
    stop: Sequence[str] = option(
        "Stop when this text appears; can be repeated.", default=(), metavar="TEXT", group="Sampling"
    )
    probe_seconds: ProbeSeconds = 120.0

    @property
    def sampling(self) -> Sampling:
        """The sampling options."""
        return group(self, Sampling)


TokenIdsFlag = Annotated[bool, Option("Prompts and output are token ids, e.g. '1,45,7'; no tokenizer is needed.")]


@dataclass(frozen=True, kw_only=True)
class RunCommand(RunOptions):
    """Generate text with any model, or chat when no prompt is given. Prompts go through the chat template where there
    is one.
    """

    HELP_GROUP = "Input"

    prompts: Sequence[str] = option(
        "The prompt; - reads it from stdin. Default: chat.", default=(), metavar="PROMPT", positional=True
    )
    raw: bool = option("Do not apply the chat template to the prompt.", default=False)
    token_ids: TokenIdsFlag = False
    report: ReportFile = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class CacheListCommand:
    """List the packages that `partita run` has exported into the cache folder."""


@dataclass(frozen=True, kw_only=True)
class CacheRemoveCommand:
    """Remove a package that `partita run` has exported from the cache folder."""

    name: Annotated[
        str, Option("Name in `partita cache list`, or the beginning of it.", metavar="NAME", positional=True)
    ]


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(PlacementLimits, RunOptions):
    """Generate text with a model. Text goes to stdout as it comes, timings to stderr."""

    HELP_GROUP = "Input"
    prompts: Sequence[str] = option(
        "The prompt; - reads it from stdin, without a trailing newline. Several prompts share the batch.",
        default=(),
        metavar="PROMPT",
        positional=True,
    )
    more_prompts: Sequence[str] = option(
        "Another prompt, after the positional ones.", default=(), flags=("--prompt", "-p"), metavar="TEXT"
    )
    input: PathText | None = option(
        "File of prompts, one row each: .jsonl (objects with prompt, messages or tokens, an id and "
        "options of the row), .txt (one prompt per line) or .parquet; - reads .jsonl from stdin. The rows "
        "share the batch.",
        short="-i",
    )
    output: PathText | None = option(
        "Output file for the completions of --input, .jsonl or .parquet, in the order of the rows. To "
        "continue an interrupted run, start it again.",
        short="-o",
        group="Output",
    )
    address: str | None = option(
        "Ray cluster that processes the rows of --input: auto (the cluster on this machine), HOST:PORT, or local (one "
        "is started for this run).",
        metavar="ADDRESS",
        group="Cluster",
    )
    workers: int | None = option(
        "Worker processes of the cluster, each with the package loaded. Default: one per GPU if cuda "
        "leads the chain, else one per machine.",
        metavar="N",
        range=Range(1, 10_000),
        group="Cluster",
    )
    chat: bool = option("Apply the tokenizer's chat template to the prompt.", default=False, short="-c")
    token_ids: TokenIdsFlag = False
    save_prefix: PathText | None = option(
        "Process the prompt, or the --system message, save the cache to FILE, and generate nothing.", group="Output"
    )
    graph_capture: GraphCapture = False
    report: ReportFile = None
    as_json: Json = False

    @property
    def is_chat(self) -> bool:
        """Whether the chat template is applied."""
        return self.chat or self.system is not None


@dataclass(frozen=True, kw_only=True)
class ChatCommand(RunOptions):
    """Talk to a model whose tokenizer has a chat template. The cache is kept between turns; Ctrl-C ends an answer,
    Ctrl-D the session, and /help shows the commands. Without a terminal, every line of stdin is a message or a command.
    """

    HELP_GROUP = "Input"
    resume: PathText | None = option("Continue a conversation written by /save.")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server."""

    HELP_GROUP = "Limits"
    max_queue: int = option("Maximum number of waiting prompts per model.", default=256, range=Range(0, MAX_COUNT))
    max_body: int = option(
        "Largest request body. Default: 4MiB.", default=4 << 20, metavar="SIZE", text="size", range=Range(1, 1 << 40)
    )
    timeout: float = option(
        "Time limit of a request, including waiting.",
        default=600.0,
        metavar="SECONDS",
        range=Range(0.001, WEEK_SECONDS),
    )
    max_requests: int = option("Maximum number of requests in progress.", default=1024, range=Range(1, MAX_COUNT))
    drain_timeout: float | None = option(
        "Grace period for running requests after SIGTERM. Default: the request timeout.",
        metavar="SECONDS",
        range=Range(0, WEEK_SECONDS),
    )


@dataclass(frozen=True, kw_only=True)
class ServeCommand(
    ProgressOptions, ForeignFolder, SpeculationOptions, ServerLimits, PlacementLimits, ProviderChain, SourceOptions
):
    """Serve models over HTTP with OpenAI's API; requests join a running batch. Exit code 3 when the chain is not
    honoured.
    """

    HELP_GROUP = "Server"
    packages: Annotated[
        Sequence[PathText],
        Option(
            "Packages, folders of another exporter, checkpoints, GGUF files or hub ids; each becomes a "
            "model of the API. A checkpoint is exported once into the cache folder.",
            metavar="MODEL",
            positional=True,
            text=MODEL,
        ),
    ]
    name: Sequence[str] = option(
        "Name of a model in the API, once for each. Default: the last part of MODEL.", default=(), metavar="NAME"
    )
    host: str = option("Address to listen on; the default accepts only clients on this machine.", default="127.0.0.1")
    port: int = option(
        "Port to listen on; 0 for any free port.",
        default=8000,
        range=Range(0, 65535, "between 1 and 65535, or 0 for any free port"),
    )
    api_key: Sequence[str] = option(
        "API key that clients must send; can be repeated. Default: PARTITA_API_KEY.", default=(), metavar="KEY"
    )
    allowed_origin: Sequence[str] = option(
        "Origin of web pages that may send requests, or * for all; can be repeated.", default=(), metavar="ORIGIN"
    )
    source: str | None = option(
        "Defaults of requests from the checkpoint's generation_config.json. Default: as in OpenAI's API, "
        "temperature 1.",
        flags=("--sampling",),
        choices=("checkpoint",),
        argument="sampling",
        group="Sampling",
    )
    adapter: Adapter = None
    prefix: Sequence[PathText] = option(
        "Prefix file of `generate --save-prefix`, for prompts that begin with it; once per model.",
        default=(),
        metavar="FILE",
        group="Input",
    )
    prefill_chunk: PrefillChunk = None
    probe_seconds: ProbeSeconds = 0.0
    as_json: Json = False
