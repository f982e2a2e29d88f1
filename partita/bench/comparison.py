"""The verdict of a benchmark as sentences: faster contender, ratio, equality of tokens, and the largest cost."""

from __future__ import annotations

from collections.abc import Sequence

from partita.bench.records import Contender, Ratio, Spread
from partita.observations.names import CPU
from partita.observations.text_format import decimals, listing, plural, short_provider
from partita.partition_reports.cost import whole_percent

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
    return decimals(found.median) + (f" ({decimals(found.low)} to {decimals(found.high)})" if ranged else "")


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
