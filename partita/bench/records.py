"""The record of `bench --json`: frozen, with units in field names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Environment, PackageFacts, PhaseName, Record

SCHEMA = "partita.bench/1"


class RoundResult(Record):
    """One generation of one contender in one round."""

    round: int
    """0 is the warm-up, which is not counted."""
    prefill_ms: tuple[float, ...]
    """Time of each session run, from the end of the previous step, or from the call, until the caller has the step."""
    prefill_tokens: int
    """Tokens of all rows."""
    decode_ms: tuple[float, ...]
    decode_tokens: int
    decode_outside_ms: float
    """Part of `decode_ms` outside the session runs: binding inputs, sampling, detokenising, transfer to the caller."""
    first_token_ms: float | None
    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each row."""
    peak_rss_bytes: int
    """Peak of the contender's process up to this round."""


class Spread(Record):
    """A figure over the counted rounds."""

    median: float
    low: float
    """Value of the lowest round."""
    high: float


class PhaseSpeed(Record):
    """Speed of one phase over the counted rounds."""

    tokens_per_second: Spread
    p50_ms: float
    """Over the session runs of all counted rounds, host work included; percentiles interpolate linearly."""
    p95_ms: float
    runs: int


class Ratio(Record):
    """Speed of a contender relative to the baseline in one phase."""

    phase: Literal["prefill", "decode"]
    median: float
    """Median of the ratios of all rounds that both contenders finished."""
    low: float
    high: float
    significance: Literal["differs", "within_noise", "too_few_rounds"]
    """Whether the ratio is significant: not if the ranges from the slowest to the fastest round overlap, or if there
    are too few rounds and the ranges are not far apart."""


class HostTimeParts(Record):
    """Host time by part, from profiled runs of a round that is not counted.

    Times are of one session run, and shares are of the time in nodes, as in a partition report.
    """

    phase: PhaseName
    provider: str
    """The first used provider of the chain, by ONNX Runtime's name."""
    nodes: int
    """File nodes on that provider; nodes that ONNX Runtime added and folded nodes are not counted."""
    fallback_nodes: int
    fallback_providers: tuple[str, ...]
    """The providers of these nodes."""
    partitions: int
    copies: int
    """Memcpy nodes, and inputs and outputs bound in another memory."""
    memcpy_nodes: int
    copy_bytes_per_token: float | None
    """All copies."""
    memcpy_bytes_per_token: float | None
    """Memcpy nodes only."""
    node_us: float | None
    """Host time in nodes; null, like the shares, if no run was profiled."""
    wait_share: float | None
    """Share of node time in Memcpy nodes: synchronising with the device, and copying."""
    provider_share: float | None
    """Share in nodes on `provider`: computing, or only enqueueing on an asynchronous device."""
    fallback_share: float | None


class Difference(Record):
    """The first position where greedy tokens differ from the baseline's."""

    row: int
    position: int
    """0-based, in the new tokens."""
    token: int | None
    """null if one of the two has no more tokens."""
    baseline_token: int | None


class Contender(Record):
    """One provider chain and its results."""

    name: str
    chain: tuple[str, ...]
    package: str = ""
    """Name of its package; empty in older results."""
    status: Literal["measured", "failed"]
    """A contender that failed after some rounds has these rounds, without ratios."""
    error: str
    """Why it failed; empty if it was measured."""
    unused_providers: tuple[str, ...]
    """A sentence for each provider of the chain that ran no node."""
    rounds: int
    """Number of counted rounds."""
    load_seconds: float | None
    """Opening the sessions, once."""
    peak_rss_bytes: int | None
    """Host memory of its process, without device memory."""
    first_token_ms: Spread | None
    prefill: PhaseSpeed | None
    decode: PhaseSpeed | None
    decode_outside_share: float | None
    """Share of decode outside the session runs."""
    ratios: tuple[Ratio, ...]
    """Empty for the baseline."""
    repeatable: bool | None
    """Every round gave the same tokens; null for fewer than two rounds."""
    same_tokens: bool | None
    """Equal to the baseline's; null for the baseline itself, or without a comparison."""
    difference: Difference | None
    host_time: HostTimeParts | None
    node_share: float | None
    """Node time of `host_time` divided by the median decode step, at most 1. The rest is outside nodes: wait for the
    device at the end of a run, and work between nodes."""
    host_time_missing_reason: str
    """Why `host_time` is null."""
    report: str | None
    """File of its partition report."""
    bounds: tuple[str, ...] = ()
    """What bounds each phase, from its profiled round."""
    round_results: tuple[RoundResult, ...]


TimePart = Literal["outside_runs", "outside_nodes", "copies", "own_nodes", "fallback_nodes"]
"""`outside_runs`: binding inputs, sampling. `outside_nodes`: in runs, but outside nodes (wait for the device at the
end, work between nodes). `copies`: Memcpy nodes. `own_nodes`: nodes on the first provider. `fallback_nodes`: others."""


class TimeResult(Record):
    """The part with most of a contender's time, if known."""

    part: TimePart | None
    """Null if unknown."""
    share: float | None = None
    """Share of decode time outside the runs, of the time of runs outside nodes, or of the node time."""
    part_missing_reason: str = ""
    """Why `part` is null."""


class PhaseResult(Record):
    """The faster contender in one phase."""

    phase: Literal["prefill", "decode"]
    faster: str | None
    """Name of the contender or of the baseline; null if the spread of the rounds is too large."""
    ratio: float
    """Speed relative to the baseline: `ratios` of the contender."""
    ratio_low: float
    ratio_high: float
    significance: Literal["differs", "within_noise", "too_few_rounds"]
    tokens_per_second: Spread
    baseline_tokens_per_second: Spread


class ContenderResult(Record):
    """The verdict on one contender as data; `verdict` has it as text."""

    contender: str
    baseline: str | None
    """Null without a comparison."""
    kind: Literal["compared", "alone", "failed"]
    same_tokens: bool | None = None
    """Equal to the baseline's; with different tokens, the speed is that of another output. Null if not compared."""
    repeatable: bool | None = None
    """Every round gave the same tokens; null for fewer than two rounds."""
    phases: tuple[PhaseResult, ...] = ()
    """The deciding phase: decode, or prefill if nothing was decoded."""
    same_provider: str | None = None
    """The provider that both ran on alone, with one package, so the ratio does not compare providers; else null."""
    time: TimeResult | None = None
    """The part with most decode time; null if not applicable, e.g. on the CPU provider alone."""


class Bench(Record):
    """The same prompt on several providers, and on several packages."""

    schema_id: Literal["partita.bench/1"] = Field(default="partita.bench/1", alias="schema")
    created: str
    partita_version: str
    verdict: tuple[str, ...]
    """One sentence per contender except the baseline, or for the baseline if it is alone: `results` as text."""
    results: tuple[ContenderResult, ...] = ()
    """Verdicts as data; empty in older results."""
    environment: Environment | None
    package: PackageFacts
    other_packages: tuple[PackageFacts, ...] = ()
    """Packages that it is compared with."""
    prompt_tokens: int
    """Per row."""
    max_new_tokens: int
    threads: int | None
    rounds: int
    """Requested number of counted rounds."""
    interrupted: bool
    baseline: str | None
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...]
