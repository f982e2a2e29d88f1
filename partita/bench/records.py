"""One prompt on several providers, as `bench --json` prints it: frozen, every number with its unit in its name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Environment, PackageFacts, PhaseName, Record

SCHEMA = "partita.bench/1"


class Turn(Record):
    """One generation of one contender in one round."""

    round: int
    """0 is the warm-up, which no figure covers."""
    prefill_ms: tuple[float, ...]
    """One per session run: until the step reached the program, from the step before or from the call."""
    prefill_tokens: int
    """Over all rows."""
    decode_ms: tuple[float, ...]
    decode_tokens: int
    decode_outside_ms: float
    """Part of `decode_ms` outside the session runs: feeding, sampling, text, and the transfer to the program."""
    first_token_ms: float | None
    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each row."""
    peak_rss_bytes: int
    """Of the contender's process, so far."""


class Spread(Record):
    """A figure over the counted rounds."""

    median: float
    low: float
    """Of the lowest round."""
    high: float


class PhaseSpeed(Record):
    """Speed of one phase over the counted rounds."""

    tokens_per_second: Spread
    p50_ms: float
    """Over the session runs of all counted rounds, host work included; percentiles interpolate linearly."""
    p95_ms: float
    runs: int


class Ratio(Record):
    """How many times as fast as the baseline a contender is in one phase."""

    phase: Literal["prefill", "decode"]
    median: float
    """Of the ratios of the rounds that both finished; a round compares turns that followed each other."""
    low: float
    high: float
    standing: Literal["differs", "within_noise", "too_few_rounds"]
    """Whether the ratio tells something: not where the ranges from the slowest to the fastest round overlap, nor over
    so few rounds that chance alone would often keep them apart, unless they are far apart.
    """


class Why(Record):
    """Where the host's time goes, from profiled runs of a round that is not counted. Times are of one session run, and
    shares are of the time in nodes, as everywhere in a report.
    """

    phase: PhaseName
    provider: str
    """The first provider of the chain that is used, by ONNX Runtime's name."""
    nodes: int
    """On that provider; Memcpy nodes are counted apart."""
    nodes_elsewhere: int
    elsewhere: tuple[str, ...]
    """The providers that have those."""
    partitions: int
    copies: int
    """Memcpy nodes, and inputs and outputs that are bound in another memory."""
    memcpy_nodes: int
    copy_bytes_per_token: float | None
    """Of all copies."""
    memcpy_bytes_per_token: float | None
    """Of the Memcpy nodes alone."""
    node_us: float | None
    """Host time in nodes; null, like the shares, when no run was profiled."""
    wait_share: float | None
    """Part of the node time in Memcpy nodes: waiting for work that was queued on the device, and copying."""
    own_share: float | None
    """In nodes on `provider`: computing, or only queueing where the device works on its own."""
    elsewhere_share: float | None


class Difference(Record):
    """The first place where greedy tokens are not those of the baseline."""

    row: int
    position: int
    """0-based, in the new tokens."""
    token: int | None
    """null where one of the two has no more tokens."""
    baseline_token: int | None


class Contender(Record):
    """One provider chain, and how it did."""

    name: str
    chain: tuple[str, ...]
    package: str = ""
    """Name of its package; empty in a result that was written without."""
    status: Literal["measured", "failed"]
    """A contender that failed later keeps the rounds that it finished, without ratios."""
    error: str
    """Why it failed; empty when it was measured."""
    unused: tuple[str, ...]
    """A sentence for each provider of the chain that ran nothing."""
    rounds: int
    """Rounds that are counted."""
    load_seconds: float | None
    """Opening the sessions, once."""
    peak_rss_bytes: int | None
    """Host memory of its process; memory of a device is not in it."""
    first_token_ms: Spread | None
    prefill: PhaseSpeed | None
    decode: PhaseSpeed | None
    decode_outside_share: float | None
    """Part of decode that is spent outside the session runs."""
    ratios: tuple[Ratio, ...]
    """Empty for the baseline."""
    repeats: bool | None
    """Every round gave the same tokens; null when there were fewer than two."""
    same_tokens: bool | None
    """As the baseline; null for the baseline itself, or where nothing can be compared."""
    difference: Difference | None
    why: Why | None
    node_share: float | None
    """Node time of `why` as part of the median decode step, at most 1. The rest is in no node: waiting for the
    device at the end of a run, and work around the nodes.
    """
    why_unknown: str
    """Why `why` is null."""
    report: str | None
    """File with its partition report."""
    turns: tuple[Turn, ...]


Spender = Literal["outside_runs", "outside_nodes", "copies", "own_nodes", "nodes_elsewhere"]
"""Where time goes: outside the session runs (feeding, sampling); in runs and outside of nodes (waiting for a device at
the end, work around nodes); in Memcpy nodes; in nodes on the contender's own provider; in nodes on others.
"""


class TimeVerdict(Record):
    """What takes most of a contender's time, as far as it is known."""

    spender: Spender | None
    """Null when it is not known."""
    share: float | None = None
    """Of decode time outside the runs, of the time of runs outside nodes, else of the node time."""
    unknown_because: str = ""
    """Why `spender` is null."""


class PhaseVerdict(Record):
    """Who is faster in one phase."""

    phase: Literal["prefill", "decode"]
    faster: str | None
    """Name of the contender or of the baseline; null where the spread of the rounds does not allow to say so."""
    ratio: float
    """How many times as fast as the baseline the contender is: `ratios` of the contender, repeated here."""
    ratio_low: float
    ratio_high: float
    standing: Literal["differs", "within_noise", "too_few_rounds"]
    tokens_per_second: Spread
    baseline_tokens_per_second: Spread


class Verdict(Record):
    """What came of one contender, as data; `verdict` says the same in sentences."""

    contender: str
    baseline: str | None
    """Null when it is compared with none."""
    kind: Literal["compared", "alone", "failed"]
    same_tokens: bool | None = None
    """As the baseline; with other tokens its speed is that of another answer. Null when nothing can be compared."""
    repeats: bool | None = None
    """Every round gave the same tokens; null when there were fewer than two."""
    phases: tuple[PhaseVerdict, ...] = ()
    """The one that decides first: decode, or prefill where nothing was decoded."""
    same_provider: str | None = None
    """The provider that both ran on alone, with one package: the ratio is then none of two providers. Else null."""
    time: TimeVerdict | None = None
    """Where the time of decode goes; null where that is no question, as on the CPU provider alone."""


class Bench(Record):
    """The same prompt on several providers, and on several packages."""

    schema_id: Literal["partita.bench/1"] = Field(default="partita.bench/1", alias="schema")
    created: str
    partita_version: str
    verdict: tuple[str, ...]
    """One sentence per contender but the baseline, and for the baseline where it is alone: `verdicts` for people."""
    verdicts: tuple[Verdict, ...] = ()
    """The same as data; empty in a result that was written without."""
    environment: Environment | None
    package: PackageFacts
    others: tuple[PackageFacts, ...] = ()
    """Packages that it is compared with."""
    prompt_tokens: int
    """Per row."""
    max_new_tokens: int
    threads: int | None
    rounds: int
    """Counted rounds that were asked for."""
    interrupted: bool
    baseline: str | None
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...]
