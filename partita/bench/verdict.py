"""The answer of a bench in sentences: how many times as fast, whether that is noise, and where the time goes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from partita.bench.records import Contender, PhaseSpeed, Ratio, Why
from partita.observations.names import CPU
from partita.observations.text_format import decimals, human_bytes, listing, plural, short_provider

Part = Literal["copies", "elsewhere", "own"]
"""Where node time goes."""
MOSTLY = 0.5
"""Part of decode outside the session runs from which that is what there is to say."""


def give_verdict(contenders: Sequence[Contender], baseline: str | None) -> tuple[str, ...]:
    """One sentence per contender but the baseline; that of the baseline when nothing is compared with it."""
    base = next((entry for entry in contenders if entry.name == baseline), None)
    said = [sentence(entry, base) for entry in contenders if entry is not base]
    compared = any(entry.ratios for entry in contenders)
    return tuple(said if compared or base is None else [alone(base), *said])


def sentence(entry: Contender, base: Contender | None) -> str:
    """What is to be said of one contender. A wrong answer comes before its speed."""
    if entry.status == "failed":
        done = f" after {plural(entry.rounds, 'counted round')}" if entry.rounds else ""
        return f"{entry.name} failed{done}: {entry.error}"
    if base is None or not entry.ratios:
        return alone(entry)
    parts = [compare(entry, base), *entry.unused]
    if entry.difference is not None:
        parts.insert(0, f"{wrong(entry, base)}, so its speed is that of another answer")
    if entry.repeats is False:
        parts.insert(0, f"{entry.name} gave other tokens from one round to the next")
    return "; ".join(parts)


def wrong(entry: Contender, base: Contender) -> str:
    """Where the tokens differ, counted as people count."""
    assert entry.difference is not None
    position, rows = entry.difference.position + 1, len(entry.turns[0].tokens)
    row = f" of row {entry.difference.row + 1}" if rows > 1 else ""
    return f"{entry.name} does not give the tokens of {base.name} from new token {position}{row} on"


def compare(entry: Contender, base: Contender) -> str:
    """The ratio of decode, or of prefill where nothing was decoded, then the other one, then where the time goes."""
    *others, main = entry.ratios
    first = f"{say_ratio(main)}{' of' if main.within_noise else ''} {base.name} in {main.phase}"
    parts = [f"{entry.name} is {first} ({figures(entry, base, main)})"]
    parts += [f"{say_ratio(other)} in {other.phase} ({figures(entry, base, other)})" for other in others]
    text = ", ".join(parts)
    if same_place(entry, base):
        text += f"; both ran on {short_provider(base.why.provider if base.why else '')} alone"
    elif main.median < 1 and not main.within_noise and (cause := where_the_time_goes(entry)):
        text += f": {cause}"
    few = main.standing == "too_few_rounds"
    chance = f"the ranges of {plural(entry.rounds, 'round')} are apart, and with so few that may be chance"
    return f"{text}; {chance}" if few else text


def same_place(entry: Contender, base: Contender) -> bool:
    """Both ran on one and the same provider, so that a ratio is none of two providers."""
    ours, theirs = entry.why, base.why
    if entry.package != base.package:
        return False
    if ours is None or theirs is None or ours.nodes_elsewhere or theirs.nodes_elsewhere:
        return False
    return ours.provider == theirs.provider


def say_ratio(found: Ratio) -> str:
    """`0.41x`, or that the spreads overlap."""
    return "within noise" if found.within_noise else f"{times(found.median)}x"


def figures(entry: Contender, base: Contender, found: Ratio) -> str:
    """Medians of both; with their ranges when those are the point."""
    ours, theirs = (entry.decode, base.decode) if found.phase == "decode" else (entry.prefill, base.prefill)
    assert ours is not None and theirs is not None
    return f"{say_speed(ours, found.within_noise)} against {say_speed(theirs, found.within_noise)} tokens/s"


def say_speed(speed: PhaseSpeed, ranged: bool = True) -> str:
    """`31.2 (29.0 to 33.1)`."""
    found = speed.tokens_per_second
    return decimals(found.median) + (f" ({decimals(found.low)} to {decimals(found.high)})" if ranged else "")


def times(value: float) -> str:
    """A ratio with two significant digits, and no exponent above 10."""
    return f"{value:.2g}" if value < 10 else decimals(value)


def alone(entry: Contender) -> str:
    """One contender without a ratio."""
    parts = [
        f"{phase} {say_speed(speed)} tokens/s"
        for phase, speed in (("decode", entry.decode), ("prefill", entry.prefill))
        if speed is not None
    ]
    cause = where_the_time_goes(entry)
    told = f"{entry.name}: {listing(parts) or 'no round is complete'}"
    return "; ".join([told, *([cause] if cause else []), *entry.unused])


def where_the_time_goes(entry: Contender) -> str:
    """The largest part of decode, in words that the figures carry; empty when none is known."""
    outside, why = entry.decode_outside_share, entry.why
    if outside is not None and outside > MOSTLY:
        return f"{whole_percent(outside)} of its decode time is outside the session runs"
    if why is None:
        return f"where its time goes is not known: {entry.why_unknown}" if entry.why_unknown else ""
    if why.provider == CPU and not why.copies and not why.nodes_elsewhere:
        return ""
    parts = list(known_parts(why))
    if not parts:
        return "where its time goes is not known: no run was profiled"
    if entry.node_share is not None and entry.node_share < MOSTLY:
        said = (
            f"{whole_percent(1 - entry.node_share)} of its {why.phase} time passes outside its "
            f"{plural(why.nodes, 'node')}, in waiting for a device at the end of a run or in work around the nodes"
        )
        return "; ".join(part for part in (said, around(why, None)) if part)
    share, where, part = max(parts)
    said = f"{whole_percent(share)} of the host's time in nodes of its {why.phase} runs is in {where}"
    return "; ".join(each for each in (said, around(why, part)) if each)


def known_parts(why: Why) -> Iterator[tuple[float, str, Part]]:
    """Share, words and kind of every part of the node time that is known."""
    if why.wait_share is not None and why.memcpy_nodes:
        size = why.memcpy_bytes_per_token
        moved = "" if size is None else f" ({human_bytes(round(size))} per token)"
        count = plural(why.memcpy_nodes, "Memcpy node")
        yield why.wait_share, f"{count}{moved}, which wait for the device to finish what is queued, and copy", "copies"
    if why.elsewhere_share is not None and why.nodes_elsewhere:
        names = listing(short_provider(name) for name in why.elsewhere)
        yield why.elsewhere_share, f"{plural(why.nodes_elsewhere, 'node')} on {names}", "elsewhere"
    if why.own_share is not None:
        yield why.own_share, f"its own {plural(why.nodes, 'node')}", "own"


def around(why: Why, told: Part | None) -> str:
    """What goes with the largest part: copies, nodes elsewhere and partitions, or that there are none. `told`: the part
    that was said already.
    """
    if not why.copies and not why.nodes_elsewhere:
        return "nothing is copied and no node is elsewhere"
    parts = []
    if why.nodes_elsewhere and told != "elsewhere":
        parts.append(f"{plural(why.nodes_elsewhere, 'node')} elsewhere")
    if why.copies and told != "copies":
        parts.append(plural(why.copies, "copy"))
    if why.partitions > 1:
        parts.append(plural(why.partitions, "partition"))
    return listing(parts) if parts else ""


def whole_percent(share: float) -> str:
    """`71 %`; what is not all of it is never 100 %."""
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"
