"""Medians, ratios and time shares of several contenders, and the verdict in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from partita.bench.records import Contender, Difference, PhaseChoice, PhaseSpeed, Ratio, RoundResult, Spread
from partita.observations.names import CPU
from partita.observations.text_format import decimals, listing, percent, plural, short_provider
from partita.partition_reports.cost import percentile
from partita.partition_reports.groups import total_us
from partita.partition_reports.outcome import summarise
from partita.partition_reports.records import Report

FEWEST_ROUNDS = 4
"""Minimum rounds for a comparison of ranges. Ranges of two equal contenders do not overlap by chance in 10 % of cases
over 3 rounds, 3 % over 4, 0.8 % over 5."""
CLEAR_GAP = 4.0
"""Ratio between the ranges that is significant over fewer rounds, too; load can slow a run down by a factor of 2.9."""
WARM_UP = 0
"""The warm-up round, which is not counted."""
MOSTLY = 0.5
"""Share of decode time outside the session runs, or outside the nodes, that is named."""
PHASES: tuple[PhaseChoice, ...] = ("decode", "prefill")


@dataclass(slots=True)
class Lane:
    """One contender, updated during the rounds."""

    name: str
    chain: tuple[str, ...]
    round_results: tuple[RoundResult, ...] = ()
    package: str = ""
    error: str = ""
    unused_providers: tuple[str, ...] = ()
    """A sentence for each unused provider of its chain."""
    load_seconds: float | None = None
    observed: Report | None = None
    """Report of the profiled round."""
    summary_missing_reason: str = ""
    """Why there is no report."""
    file: str | None = None
    """File of the report."""

    def counted(self, complete: frozenset[int]) -> tuple[RoundResult, ...]:
        """Rounds of the figures; all finished rounds for a contender that failed."""
        rounds = (turn for turn in self.round_results if turn.round != WARM_UP)
        return tuple(turn for turn in rounds if self.error or turn.round in complete)


# Figures


def spread(values: Sequence[float]) -> Spread:
    """Median, minimum and maximum of at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def _rates(turns: Sequence[RoundResult], phase: PhaseChoice) -> dict[int, float]:
    """Round -> tokens per second of a phase, of the rounds that ran it."""
    return {turn.round: rate for turn in turns if (rate := turn.rate(phase)) is not None}


def complete_rounds(lanes: Sequence[Lane]) -> frozenset[int]:
    """Counted rounds: without the warm-up, and finished by every contender that did not fail."""
    alive = [frozenset(turn.round for turn in lane.round_results) for lane in lanes if not lane.error]
    return frozenset.intersection(*alive) - {WARM_UP} if alive else frozenset()


def shown_rounds(lanes: Sequence[Lane]) -> frozenset[int]:
    """Rounds of the figures: the complete ones, or all if none is complete."""
    return complete_rounds(lanes) or frozenset(turn.round for lane in lanes for turn in lane.round_results) - {WARM_UP}


def _phase_speed(turns: Sequence[RoundResult], phase: PhaseChoice) -> PhaseSpeed | None:
    """Speed of a phase over these turns; None if it has no run."""
    rates = _rates(turns, phase)
    times = [ms for turn in turns for ms in turn.times(phase)]
    p50, p95 = percentile(times, 50), percentile(times, 95)
    if not rates or p50 is None or p95 is None:
        return None
    return PhaseSpeed(tokens_per_second=spread([*rates.values()]), p50_ms=p50, p95_ms=p95, runs=len(times))


def ratio(ours: Sequence[RoundResult], theirs: Sequence[RoundResult], phase: PhaseChoice) -> Ratio | None:
    """Speed of `ours` divided by that of `theirs`, round by round; None if no round has both."""
    mine, base = _rates(ours, phase), _rates(theirs, phase)
    rounds = [number for number in mine if number in base]
    if not rounds:
        return None
    left, right = (spread([rates[number] for number in rounds]) for rates in (mine, base))
    ratios = spread([mine[number] / base[number] for number in rounds])
    return Ratio.copy_of(ratios, phase=phase, significance=differ(left, right, len(rounds)))


def differ(left: Spread, right: Spread, rounds: int) -> Literal["differs", "within_noise", "too_few_rounds"]:
    """Whether two speeds over `rounds` rounds differ: their ranges do not overlap, over enough rounds or by far."""
    lower, higher = sorted((left, right), key=lambda found: found.median)
    if higher.low <= lower.high:
        return "within_noise"
    gap = higher.low / lower.high if lower.high > 0 else float("inf")
    return "differs" if rounds >= FEWEST_ROUNDS or gap >= CLEAR_GAP else "too_few_rounds"


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Difference | None:
    """The earliest position where a row's tokens differ, or None. Rows of only one of the two are skipped."""
    found = [
        Difference(row=row, position=position, token=token, baseline_token=base)
        for row, (mine, others) in enumerate(zip(ours, theirs, strict=False))
        for position, (token, base) in enumerate(zip_longest(mine, others))
        if token != base
    ]
    return min(found, key=lambda entry: (entry.position, entry.row), default=None)


def choose_baseline(lanes: Sequence[Lane], requested: str | None) -> str | None:
    """The baseline contender: `requested`, else the first package on cpu, else the first measured one, else None."""
    measured = [lane for lane in lanes if not lane.error]
    on_cpu = [lane for lane in measured if lane.chain == (CPU,) and lane.package == lanes[0].package]
    return next((lane.name for lane in (*(x for x in measured if x.name == requested), *on_cpu, *measured)), None)


def build_contenders(lanes: Sequence[Lane], baseline: str | None) -> tuple[Contender, ...]:
    """The figures of all contenders, in order. `baseline`: name of the baseline contender."""
    complete = shown_rounds(lanes)
    base = next((lane for lane in lanes if lane.name == baseline), None)
    return tuple(_build_contender(lane, base, complete) for lane in lanes)


def _build_contender(lane: Lane, base: Lane | None, complete: frozenset[int]) -> Contender:
    """The figures of one contender. `base`: the baseline, possibly the contender itself."""
    turns, report = lane.counted(complete), lane.observed
    theirs = base.counted(complete) if base is not None and base is not lane and not lane.error else ()
    difference = first_difference(turns[0].tokens, theirs[0].tokens) if turns and theirs else None
    decode, decode_ms = _phase_speed(turns, "decode"), sum(sum(turn.decode_ms) for turn in turns)
    step_us = 1000 * decode.p50_ms if decode is not None else 0.0
    first_tokens = [turn.first_token_ms for turn in turns if turn.first_token_ms is not None]
    phases = report.phases if report is not None else ()
    node_us = next((total_us(phase.nodes) for phase in phases if phase.name == "decode"), None)
    return Contender.copy_of(
        lane,
        status="failed" if lane.error else "measured",
        rounds=len(turns),
        peak_rss_bytes=max((turn.peak_rss_bytes for turn in lane.round_results), default=None),
        first_token_ms=spread(first_tokens) if first_tokens else None,
        prefill=_phase_speed(turns, "prefill"),
        decode=decode,
        decode_outside_share=sum(turn.decode_outside_ms for turn in turns) / decode_ms if decode_ms else None,
        ratios=tuple(found for phase in PHASES if (found := ratio(turns, theirs, phase)) is not None),
        repeatable=len({turn.tokens for turn in lane.round_results}) == 1 if len(lane.round_results) > 1 else None,
        same_tokens=difference is None if turns and theirs else None,
        difference=difference,
        summary=summarise(report) if report else None,
        node_share=min(1.0, node_us / step_us) if node_us is not None and step_us > 0 else None,
        bounds=tuple(phase.bound.sentence for phase in phases if phase.bound is not None),
        report=lane.file,
    )


# The verdict


def sentences(contenders: Sequence[Contender], baseline: str | None) -> tuple[str, ...]:
    """A sentence per contender except the baseline; the baseline's first if it is compared with none."""
    base = next((entry for entry in contenders if entry.name == baseline), None)
    found = [_sentence(entry, base) for entry in contenders if entry is not base]
    compared = any(entry.ratios for entry in contenders)
    return tuple(found if compared or base is None else [_sentence(base, None), *found])


def _sentence(entry: Contender, base: Contender | None) -> str:
    """The sentence about one contender. Different tokens come before its speed."""
    if entry.status == "failed":
        done = f" after {plural(entry.rounds, 'counted round')}" if entry.rounds else ""
        return f"{entry.name} failed{done}: {entry.error}"
    if base is None or not entry.ratios:
        speeds = [f"{phase} {_speed_text(speed)} tokens/s" for phase, speed in entry.speeds.items()]
        alone = (f"{entry.name}: {listing(speeds) or 'no round is complete'}", _largest_cost(entry))
        return "; ".join(filter(None, (*alone, *entry.unused_providers)))
    parts = []
    if entry.repeatable is False:
        parts.append(f"{entry.name} is not deterministic: its tokens differ between rounds")
    if entry.difference is not None:
        row = f" of row {entry.difference.row + 1}" if len(entry.round_results[0].tokens) > 1 else ""
        from_token = f"differ from new token {entry.difference.position + 1}{row} on"
        parts.append(f"the tokens of {entry.name} and {base.name} {from_token}; their speeds are for different output")
    return "; ".join([*parts, *_compare(entry, base), *entry.unused_providers])


def _compare(entry: Contender, base: Contender) -> Iterator[str]:
    """The ratio of decode, or of prefill if nothing was decoded, then of the other phase, then the largest cost."""
    ratios, texts = sorted(entry.ratios, key=lambda found: PHASES.index(found.phase)), []
    main = ratios[0]
    for found in ratios:
        noise = found.significance == "within_noise"
        named = f"{' of' if noise else ''} {base.name}" if found is main else ""
        speeds = " against ".join(_speed_text(side.speeds[found.phase], ranged=noise) for side in (entry, base))
        times = "within noise" if noise else f"{ratio_text(found.median)}x"
        texts.append(f"{times}{named} in {found.phase} ({speeds} tokens/s)")
    text, provider = f"{entry.name} is {', '.join(texts)}", _only_provider(entry)
    if provider is not None and entry.package == base.package and provider == _only_provider(base):
        text += f"; both ran on {short_provider(provider)} only"
    elif main.median < 1 and main.significance != "within_noise" and (cost := _largest_cost(entry)):
        text += f": {cost}"
    yield text
    if main.significance == "too_few_rounds":
        yield f"the ranges do not overlap, but {plural(entry.rounds, 'round')} are too few to exclude noise"


def _speed_text(speed: PhaseSpeed, *, ranged: bool = True) -> str:
    """`31.2 (29.0 to 33.1)`: the median with its range."""
    rate = speed.tokens_per_second
    span = f" ({decimals(rate.low)} to {decimals(rate.high)})" if ranged and rate.low != rate.high else ""
    return f"{decimals(rate.median)}{span}"


def ratio_text(value: float) -> str:
    """A ratio with two significant digits, and no exponent above 10."""
    return f"{value:.2g}" if value < 10 else decimals(value)


def _only_provider(entry: Contender) -> str | None:
    """The provider of all nodes in the last phase; None if there are several, or it is unknown."""
    names = tuple(entry.summary.phases[-1].nodes_by_provider) if entry.summary and entry.summary.phases else ()
    return names[0] if len(names) == 1 else None


def _largest_cost(entry: Contender) -> str:
    """Where most of the decode time is; empty if unknown, or if every node is on the CPU provider."""
    outside = entry.decode_outside_share
    if outside is not None and outside > MOSTLY:
        return f"{percent(outside, 0)} of its decode time is outside the session runs"
    if _only_provider(entry) == CPU:
        return ""
    if entry.node_share is not None and entry.node_share < MOSTLY:
        rest = percent(1 - entry.node_share, 0)
        return f"{rest} of its decode time is outside its nodes (wait for the device, work between nodes)"
    if entry.summary_missing_reason:
        return f"its placement is unknown: {entry.summary_missing_reason}"
    return entry.summary.verdict if entry.summary is not None else ""
