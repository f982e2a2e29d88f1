"""Options of `bench`."""

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
    PrefillChunk,
    ProgressOptions,
    ProviderLibraries,
    ProviderOptions,
    SourceOptions,
    Threads,
)


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
