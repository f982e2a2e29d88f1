"""The record of `bench --json`: frozen, with units in field names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Environment, PackageFacts, Record
from partita.partition_reports.records import Summary

SCHEMA = "partita.bench/1"
PhaseChoice = Literal["prefill", "decode"]


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

    def rate(self, phase: PhaseChoice) -> float | None:
        """Tokens per second of a phase; None if it has no run."""
        total, tokens = sum(self.times(phase)), self.decode_tokens if phase == "decode" else self.prefill_tokens
        return 1000 * tokens / total if total > 0 and tokens else None

    def times(self, phase: PhaseChoice) -> tuple[float, ...]:
        """Milliseconds of each run of a phase."""
        return self.decode_ms if phase == "decode" else self.prefill_ms


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


class Ratio(Spread):
    """Speed of a contender relative to the baseline in one phase, over all rounds that both contenders finished."""

    phase: PhaseChoice
    significance: Literal["differs", "within_noise", "too_few_rounds"]
    """Whether the ratio is significant: not if the ranges from the slowest to the fastest round overlap, or if there
    are too few rounds and the ranges are not far apart."""


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
    summary: Summary | None
    """Summary of the partition report of its profiled round, which is not counted."""
    summary_missing_reason: str
    """Why `summary` is null."""
    node_share: float | None
    """Host time of all nodes in a profiled decode run divided by the median decode step, at most 1. The rest is outside
    nodes: wait for the device at the end of a run, and work between nodes."""
    report: str | None
    """File of its partition report."""
    bounds: tuple[str, ...] = ()
    """What bounds each phase, from its profiled round."""
    round_results: tuple[RoundResult, ...]

    @property
    def speeds(self) -> dict[PhaseChoice, PhaseSpeed]:
        """The phases with runs, and their speed."""
        found: dict[PhaseChoice, PhaseSpeed | None] = {"decode": self.decode, "prefill": self.prefill}
        return {phase: speed for phase, speed in found.items() if speed is not None}


class Bench(Record):
    """The same prompt on several providers, and on several packages."""

    schema_id: Literal["partita.bench/1"] = Field(default="partita.bench/1", alias="schema")
    created: str
    partita_version: str
    verdict: tuple[str, ...]
    """One sentence per contender except the baseline, or for the baseline if it is alone. `ratios`, `difference` and
    `summary` of the contenders have the figures."""
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
