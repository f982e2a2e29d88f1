"""The verdict of a benchmark as data and as sentences: faster contender, ratio, and the part with most time."""

from __future__ import annotations

from collections.abc import Sequence

from partita.bench.records import (
    Bench,
    Contender,
    ContenderResult,
    HostTimeParts,
    PhaseResult,
    Ratio,
    Spread,
    TimePart,
    TimeResult,
)
from partita.observations.names import CPU
from partita.observations.text_format import decimals, human_bytes, listing, plural, short_provider

MOSTLY = 0.5
"""Share of decode time outside the session runs, or outside the nodes, that makes it the main part."""


def judge(contenders: Sequence[Contender], baseline: str | None) -> tuple[ContenderResult, ...]:
    """One verdict per contender except the baseline; the baseline's first if it is compared with none."""
    base = next((entry for entry in contenders if entry.name == baseline), None)
    found = [_judge_one(entry, base) for entry in contenders if entry is not base]
    compared = any(entry.ratios for entry in contenders)
    return tuple(found if compared or base is None else [_judge_alone(base), *found])


def _judge_one(entry: Contender, base: Contender | None) -> ContenderResult:
    """The verdict on one contender."""
    if entry.status == "failed":
        return ContenderResult(contender=entry.name, baseline=None, kind="failed")
    if base is None or not entry.ratios:
        return _judge_alone(entry)
    *others, main = entry.ratios  # of decode, or of prefill if nothing was decoded
    return ContenderResult(
        contender=entry.name,
        baseline=base.name,
        kind="compared",
        same_tokens=entry.same_tokens,
        repeatable=entry.repeatable,
        phases=tuple(_weigh(entry, base, ratio) for ratio in (main, *others)),
        same_provider=_same_provider(entry, base),
        time=_judge_time(entry),
    )


def _judge_alone(entry: Contender) -> ContenderResult:
    """The verdict on a contender without a ratio."""
    time = _judge_time(entry)
    return ContenderResult(contender=entry.name, baseline=None, kind="alone", repeatable=entry.repeatable, time=time)


def _weigh(entry: Contender, base: Contender, found: Ratio) -> PhaseResult:
    """The faster of the two in one phase."""
    ours, theirs = (entry.decode, base.decode) if found.phase == "decode" else (entry.prefill, base.prefill)
    assert ours is not None and theirs is not None
    differs = found.significance == "differs" and found.median != 1
    return PhaseResult(
        phase=found.phase,
        faster=None if not differs else entry.name if found.median > 1 else base.name,
        ratio=found.median,
        ratio_low=found.low,
        ratio_high=found.high,
        significance=found.significance,
        tokens_per_second=ours.tokens_per_second,
        baseline_tokens_per_second=theirs.tokens_per_second,
    )


def _same_provider(entry: Contender, base: Contender) -> str | None:
    """The provider of all nodes of both, with the same package; None if there are others."""
    ours, theirs = entry.host_time, base.host_time
    if entry.package != base.package or ours is None or theirs is None:
        return None
    if ours.fallback_nodes or theirs.fallback_nodes or ours.provider != theirs.provider:
        return None
    return ours.provider


def _judge_time(entry: Contender) -> TimeResult | None:
    """The part with most decode time; None on the CPU provider alone."""
    outside, reason = entry.decode_outside_share, entry.host_time
    if outside is not None and outside > MOSTLY:
        return TimeResult(part="outside_runs", share=outside)
    if reason is None:
        return (
            TimeResult(part=None, part_missing_reason=entry.host_time_missing_reason)
            if entry.host_time_missing_reason
            else None
        )
    if reason.provider == CPU and not reason.copies and not reason.fallback_nodes:
        return None
    parts: list[tuple[float, TimePart]] = []
    if reason.wait_share is not None and reason.memcpy_nodes:
        parts.append((reason.wait_share, "copies"))
    if reason.provider_share is not None:
        parts.append((reason.provider_share, "own_nodes"))
    if reason.fallback_share is not None and reason.fallback_nodes:
        parts.append((reason.fallback_share, "fallback_nodes"))
    if not parts:
        return TimeResult(part=None, part_missing_reason="no run was profiled")
    if entry.node_share is not None and entry.node_share < MOSTLY:
        return TimeResult(part="outside_nodes", share=1 - entry.node_share)
    share, largest = max(parts, key=lambda entry: entry[0])
    return TimeResult(part=largest, share=share)


def sentences(verdicts: Sequence[ContenderResult], contenders: Sequence[Contender]) -> tuple[str, ...]:
    """One sentence per verdict."""
    by_name = {entry.name: entry for entry in contenders}
    return tuple(_sentence(each, by_name) for each in verdicts)


def summary_of(bench: Bench) -> tuple[str, ...]:
    """The sentences of a benchmark; stored sentences for older results."""
    return sentences(bench.results, bench.contenders) if bench.results else bench.verdict


def _sentence(verdict: ContenderResult, contenders: dict[str, Contender]) -> str:
    """The sentence about one contender. Different tokens come before its speed."""
    entry = contenders[verdict.contender]
    if verdict.kind == "failed":
        done = f" after {plural(entry.rounds, 'counted round')}" if entry.rounds else ""
        return f"{entry.name} failed{done}: {entry.error}"
    if verdict.baseline is None:
        return _sentence_alone(verdict, entry)
    base = contenders[verdict.baseline]
    parts = [_compare(verdict, entry), *entry.unused_providers]
    if entry.difference is not None:
        parts.insert(0, f"{_render_difference(entry, base)}; their speeds are for different output")
    if verdict.repeatable is False:
        parts.insert(0, f"{entry.name} is not deterministic: its tokens differ between rounds")
    return "; ".join(parts)


def _render_difference(entry: Contender, base: Contender) -> str:
    """The first differing token, counted from 1."""
    assert entry.difference is not None
    position, rows = entry.difference.position + 1, len(entry.round_results[0].tokens)
    row = f" of row {entry.difference.row + 1}" if rows > 1 else ""
    return f"the tokens of {entry.name} and {base.name} differ from new token {position}{row} on"


def _compare(verdict: ContenderResult, entry: Contender) -> str:
    """The ratio of the main phase, then of the other phase, then the part with most time."""
    main, *others = verdict.phases
    noise = main.significance == "within_noise"
    first = f"{_render_ratio(main)}{' of' if noise else ''} {verdict.baseline} in {main.phase}"
    parts = [f"{entry.name} is {first} ({_figures(main)})"]
    parts += [f"{_render_ratio(other)} in {other.phase} ({_figures(other)})" for other in others]
    text = ", ".join(parts)
    if verdict.same_provider is not None:
        text += f"; both ran on {short_provider(verdict.same_provider)} only"
    elif main.ratio < 1 and not noise and (cause := _render_time(verdict, entry)):
        text += f": {cause}"
    noisy = f"the ranges do not overlap, but {plural(entry.rounds, 'round')} are too few to exclude noise"
    return f"{text}; {noisy}" if main.significance == "too_few_rounds" else text


def _render_ratio(found: PhaseResult) -> str:
    """`0.41x`, or that the ranges overlap."""
    return "within noise" if found.significance == "within_noise" else f"{times(found.ratio)}x"


def _figures(found: PhaseResult) -> str:
    """Medians of both, with ranges if these overlap."""
    ranged = found.significance == "within_noise"
    ours, theirs = found.tokens_per_second, found.baseline_tokens_per_second
    return f"{_render_speed(ours, ranged)} against {_render_speed(theirs, ranged)} tokens/s"


def _render_speed(found: Spread, ranged: bool = True) -> str:
    """`31.2 (29.0 to 33.1)`."""
    return decimals(found.median) + (f" ({decimals(found.low)} to {decimals(found.high)})" if ranged else "")


def times(value: float) -> str:
    """A ratio with two significant digits, and no exponent above 10."""
    return f"{value:.2g}" if value < 10 else decimals(value)


def _sentence_alone(verdict: ContenderResult, entry: Contender) -> str:
    """The sentence about a contender without a ratio."""
    parts = [
        f"{phase} {_render_speed(speed.tokens_per_second)} tokens/s"
        for phase, speed in (("decode", entry.decode), ("prefill", entry.prefill))
        if speed is not None
    ]
    speed = f"{entry.name}: {listing(parts) or 'no round is complete'}"
    return "; ".join(filter(None, (speed, _render_time(verdict, entry), *entry.unused_providers)))


def _render_time(verdict: ContenderResult, entry: Contender) -> str:
    """The part with most decode time; empty if unknown."""
    time, reason = verdict.time, entry.host_time
    if time is None:
        return ""
    if time.part is None or time.share is None:
        return f"time by part is unknown: {time.part_missing_reason}"
    if time.part == "outside_runs":
        return f"{whole_percent(time.share)} of its decode time is outside the session runs"
    assert reason is not None
    if time.part == "outside_nodes":
        text = (
            f"{whole_percent(time.share)} of its {reason.phase} time is outside its {plural(reason.nodes, 'node')}: "
            "wait for the device at the end of a run, and work between nodes"
        )
    else:
        text = f"{whole_percent(time.share)} of the host time of its nodes in {reason.phase} is in "
        text += _render_nodes(reason, time.part)
    return "; ".join(filter(None, (text, _around(reason, time.part))))


def _render_nodes(why: HostTimeParts, part: str) -> str:
    """The nodes with most of the node time."""
    if part == "copies":
        size = why.memcpy_bytes_per_token
        moved = "" if size is None else f" ({human_bytes(round(size))} per token)"
        count = plural(why.memcpy_nodes, "Memcpy node")
        return f"{count}{moved}, which synchronise with the device and copy"
    if part == "fallback_nodes":
        names = listing(short_provider(name) for name in why.fallback_providers)
        return f"{plural(why.fallback_nodes, 'node')} on {names}"
    return f"its {plural(why.nodes, 'node')} on {short_provider(why.provider)}"


def _around(why: HostTimeParts, part: str) -> str:
    """Counts of copies, fallbacks and partitions, without those of `part`."""
    if not why.copies and not why.fallback_nodes:
        return "no copies, no fallbacks"
    parts = []
    if why.fallback_nodes and part != "fallback_nodes":
        parts.append(plural(why.fallback_nodes, "fallback"))
    if why.copies and part != "copies":
        parts.append(plural(why.copies, "copy"))
    if why.partitions > 1:
        parts.append(plural(why.partitions, "partition"))
    return listing(parts) if parts else ""


def whole_percent(share: float) -> str:
    """`71 %`; 100 % only for a share of 1."""
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"
