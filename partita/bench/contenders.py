"""Medians, ratios and time shares of several contenders, and the verdict in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from partita.bench.records import Contender, Difference, PhaseSpeed, Ratio, RoundResult, Spread
from partita.observations.names import CPU
from partita.observations.text_format import decimals, listing, plural, short_provider
from partita.partition_reports.cost import percentile, whole_percent
from partita.partition_reports.groups import total_us
from partita.partition_reports.outcome import headline, summarise
from partita.partition_reports.records import Report

FEWEST_ROUNDS = 4
"""Minimum rounds for a comparison of ranges. Ranges of two equal contenders do not overlap by chance in 10 % of cases
over 3 rounds, 3 % over 4, 0.8 % over 5."""
CLEAR_GAP = 4.0
"""Ratio between the ranges that is significant over fewer rounds, too; load can slow a run down by a factor of 2.9."""
WARM_UP = 0
"""The warm-up round, which is not counted."""
PhaseChoice = Literal["prefill", "decode"]
PHASES: tuple[PhaseChoice, ...] = ("prefill", "decode")


@dataclass(slots=True)
class Lane:
    """One contender, updated during the rounds."""

    name: str
    chain: tuple[str, ...]
    round_results: tuple[RoundResult, ...] = ()
    package: str = ""
    error: str = ""
    unused: tuple[str, ...] = ()
    """A sentence for each unused provider of its chain."""
    load_seconds: float | None = None
    observed: Report | None = None
    """Report of the profiled round."""
    report_missing_reason: str = ""
    """Why there is no report."""
    file: str | None = None
    """File of the report."""

    @property
    def on_cpu(self) -> bool:
        """Whether its chain is the CPU provider alone."""
        return self.chain == (CPU,)


def spread(values: Iterable[float]) -> Spread | None:
    """Median, minimum and maximum; None without values."""
    listed = list(values)
    return Spread(median=statistics.median(listed), low=min(listed), high=max(listed)) if listed else None


def _rate(turn: RoundResult, phase: PhaseChoice) -> float | None:
    """Tokens per second of one turn; None if the phase has no run."""
    total, tokens = sum(_times(turn, phase)), turn.prefill_tokens if phase == "prefill" else turn.decode_tokens
    return 1000 * tokens / total if total > 0 and tokens else None


def _times(turn: RoundResult, phase: PhaseChoice) -> tuple[float, ...]:
    """Milliseconds of each run of a phase."""
    return turn.prefill_ms if phase == "prefill" else turn.decode_ms


def complete_rounds(lanes: Sequence[Lane]) -> frozenset[int]:
    """Counted rounds: without the warm-up, and finished by every contender that did not fail."""
    alive = [frozenset(turn.round for turn in lane.round_results) for lane in lanes if not lane.error]
    return frozenset.intersection(*alive) - {WARM_UP} if alive else frozenset()


def shown_rounds(lanes: Sequence[Lane]) -> frozenset[int]:
    """Rounds of the figures: the complete ones, or all if none is complete."""
    return complete_rounds(lanes) or frozenset(turn.round for lane in lanes for turn in lane.round_results) - {WARM_UP}


def _counted(lane: Lane, complete: frozenset[int]) -> tuple[RoundResult, ...]:
    """Turns of the figures; all finished turns for a contender that failed."""
    return tuple(
        turn for turn in lane.round_results if turn.round != WARM_UP and (lane.error or turn.round in complete)
    )


def _phase_speed(turns: Sequence[RoundResult], phase: PhaseChoice) -> PhaseSpeed | None:
    """Speed of a phase over these turns; None if it has no run."""
    rates = [value for turn in turns if (value := _rate(turn, phase)) is not None]
    times = [ms for turn in turns for ms in _times(turn, phase)]
    over = spread(rates)
    p50, p95 = percentile(times, 50), percentile(times, 95)
    if over is None or p50 is None or p95 is None:
        return None
    return PhaseSpeed(tokens_per_second=over, p50_ms=p50, p95_ms=p95, runs=len(times))


def ratio(ours: Sequence[RoundResult], theirs: Sequence[RoundResult], phase: PhaseChoice) -> Ratio | None:
    """Speed of `ours` divided by that of `theirs`, round by round; None if no round has both."""
    other = {turn.round: _rate(turn, phase) for turn in theirs}
    pairs = [
        (mine, base)
        for turn in ours
        if (mine := _rate(turn, phase)) is not None and (base := other.get(turn.round)) is not None
    ]
    ratios = spread(mine / base for mine, base in pairs)
    left, right = spread(pair[0] for pair in pairs), spread(pair[1] for pair in pairs)
    if ratios is None or left is None or right is None:
        return None
    return Ratio(
        phase=phase,
        median=ratios.median,
        low=ratios.low,
        high=ratios.high,
        significance=differ(left, right, len(pairs)),
    )


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
    on_cpu = [lane for lane in measured if lane.on_cpu and lane.package == lanes[0].package]
    return next((lane.name for lane in (*(x for x in measured if x.name == requested), *on_cpu, *measured)), None)


def build_contenders(lanes: Sequence[Lane], baseline: str | None) -> tuple[Contender, ...]:
    """The figures of all contenders, in order. `baseline`: name of the baseline contender."""
    complete = shown_rounds(lanes)
    base = next((lane for lane in lanes if lane.name == baseline), None)
    return tuple(contender(lane, base, complete) for lane in lanes)


def contender(lane: Lane, base: Lane | None, complete: frozenset[int]) -> Contender:
    """The figures of one contender. `base`: the baseline, possibly the contender itself."""
    turns = _counted(lane, complete)
    rival = base if base is not None and base is not lane and not lane.error else None
    theirs = _counted(rival, complete) if rival is not None else ()
    difference = first_difference(turns[0].tokens, theirs[0].tokens) if turns and theirs else None
    decode, report = _phase_speed(turns, "decode"), lane.observed
    decode_ms = sum(sum(turn.decode_ms) for turn in turns)
    return Contender(
        name=lane.name,
        chain=lane.chain,
        package=lane.package,
        status="failed" if lane.error else "measured",
        error=lane.error,
        unused_providers=lane.unused,
        rounds=len(turns),
        load_seconds=lane.load_seconds,
        peak_rss_bytes=max((turn.peak_rss_bytes for turn in lane.round_results), default=None),
        first_token_ms=spread(turn.first_token_ms for turn in turns if turn.first_token_ms is not None),
        prefill=_phase_speed(turns, "prefill"),
        decode=decode,
        decode_outside_share=sum(turn.decode_outside_ms for turn in turns) / decode_ms if decode_ms else None,
        ratios=tuple(found for phase in PHASES if (found := ratio(turns, theirs, phase)) is not None),
        repeatable=len({turn.tokens for turn in lane.round_results}) == 1 if len(lane.round_results) > 1 else None,
        same_tokens=difference is None if turns and theirs else None,
        difference=difference,
        summary=summarise(report) if report else None,
        summary_missing_reason=lane.report_missing_reason,
        headline=headline(report) if report else "",
        node_share=_node_share(lane, decode),
        bounds=tuple(phase.bound.sentence for phase in (report.phases if report else ()) if phase.bound is not None),
        report=lane.file,
        round_results=lane.round_results,
    )


def _node_share(lane: Lane, decode: PhaseSpeed | None) -> float | None:
    """Node time of the profiled decode runs divided by the median counted step, at most 1."""
    phase = next((each for each in lane.observed.phases if each.name == "decode"), None) if lane.observed else None
    node_us = total_us(phase.nodes) if phase is not None else None
    if node_us is None or decode is None or decode.p50_ms <= 0:
        return None
    return min(1.0, node_us / 1000 / decode.p50_ms)


MOSTLY = 0.5
"""Share of decode time outside the session runs, or outside the nodes, that is named."""


def sentences(contenders: Sequence[Contender], baseline: str | None) -> tuple[str, ...]:
    """A sentence per contender except the baseline; the baseline's first if it is compared with none."""
    base = next((entry for entry in contenders if entry.name == baseline), None)
    found = [_sentence(entry, base) for entry in contenders if entry is not base]
    compared = any(entry.ratios for entry in contenders)
    return tuple(found if compared or base is None else [_sentence_alone(base), *found])


def _sentence(entry: Contender, base: Contender | None) -> str:
    """The sentence about one contender. Different tokens come before its speed."""
    if entry.status == "failed":
        done = f" after {plural(entry.rounds, 'counted round')}" if entry.rounds else ""
        return f"{entry.name} failed{done}: {entry.error}"
    if base is None or not entry.ratios:
        return _sentence_alone(entry)
    parts = []
    if entry.repeatable is False:
        parts.append(f"{entry.name} is not deterministic: its tokens differ between rounds")
    if entry.difference is not None:
        row = f" of row {entry.difference.row + 1}" if len(entry.round_results[0].tokens) > 1 else ""
        from_token = f"differ from new token {entry.difference.position + 1}{row} on"
        parts.append(f"the tokens of {entry.name} and {base.name} {from_token}; their speeds are for different output")
    return "; ".join([*parts, _compare(entry, base), *entry.unused_providers])


def _compare(entry: Contender, base: Contender) -> str:
    """The ratio of decode, or of prefill if nothing was decoded, then of the other phase, then the largest cost."""
    *others, main = entry.ratios
    noise = main.significance == "within_noise"
    first = f"{_render_ratio(main)}{' of' if noise else ''} {base.name} in {main.phase}"
    parts = [f"{entry.name} is {first} ({_speeds(entry, base, main)})"]
    parts += [f"{_render_ratio(other)} in {other.phase} ({_speeds(entry, base, other)})" for other in others]
    text = ", ".join(parts)
    provider = _only_provider(entry)
    if provider is not None and entry.package == base.package and provider == _only_provider(base):
        text += f"; both ran on {short_provider(provider)} only"
    elif main.median < 1 and not noise and (cost := _largest_cost(entry)):
        text += f": {cost}"
    noisy = f"the ranges do not overlap, but {plural(entry.rounds, 'round')} are too few to exclude noise"
    return f"{text}; {noisy}" if main.significance == "too_few_rounds" else text


def _render_ratio(found: Ratio) -> str:
    """`0.41x`, or that the ranges overlap."""
    return "within noise" if found.significance == "within_noise" else f"{times(found.median)}x"


def _speeds(entry: Contender, base: Contender, found: Ratio) -> str:
    """Medians of both in a phase, with ranges if these overlap."""
    both = (entry.decode, base.decode) if found.phase == "decode" else (entry.prefill, base.prefill)
    ranged = found.significance == "within_noise"
    ours, theirs = (_render_speed(each.tokens_per_second, ranged) for each in both if each is not None)
    return f"{ours} against {theirs} tokens/s"


def _render_speed(found: Spread, ranged: bool = True) -> str:
    """`31.2 (29.0 to 33.1)`."""
    spread = f" ({decimals(found.low)} to {decimals(found.high)})" if ranged and found.low != found.high else ""
    return f"{decimals(found.median)}{spread}"


def times(value: float) -> str:
    """A ratio with two significant digits, and no exponent above 10."""
    return f"{value:.2g}" if value < 10 else decimals(value)


def _sentence_alone(entry: Contender) -> str:
    """The sentence about a contender without a ratio."""
    parts = [
        f"{phase} {_render_speed(speed.tokens_per_second)} tokens/s"
        for phase, speed in (("decode", entry.decode), ("prefill", entry.prefill))
        if speed is not None
    ]
    speed = f"{entry.name}: {listing(parts) or 'no round is complete'}"
    return "; ".join(filter(None, (speed, _largest_cost(entry), *entry.unused_providers)))


def _only_provider(entry: Contender) -> str | None:
    """The provider of all nodes in the last phase; None if there are several, or it is unknown."""
    names = tuple(entry.summary.phases[-1].nodes_by_provider) if entry.summary and entry.summary.phases else ()
    return names[0] if len(names) == 1 else None


def _largest_cost(entry: Contender) -> str:
    """Where most of the decode time is; empty if unknown, or if every node is on the CPU provider."""
    outside = entry.decode_outside_share
    if outside is not None and outside > MOSTLY:
        return f"{whole_percent(outside)} of its decode time is outside the session runs"
    if _only_provider(entry) == CPU:
        return ""
    if entry.node_share is not None and entry.node_share < MOSTLY:
        rest = whole_percent(1 - entry.node_share)
        return f"{rest} of its decode time is outside its nodes (wait for the device, work between nodes)"
    reason = entry.summary_missing_reason
    return f"its placement is unknown: {reason}" if reason else entry.headline
