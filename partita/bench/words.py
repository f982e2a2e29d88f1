"""What a bench comes to in sentences, from its verdicts and figures. Decides nothing: `verdict` has done that."""

from __future__ import annotations

from collections.abc import Sequence

from partita.bench.records import Bench, Contender, PhaseVerdict, Spread, Verdict, Why
from partita.bench.verdict import judge
from partita.observations.text_format import decimals, human_bytes, listing, plural, short_provider


def give_verdict(contenders: Sequence[Contender], baseline: str | None) -> tuple[str, ...]:
    """A sentence per verdict."""
    return sentences(judge(contenders, baseline), contenders)


def sentences(verdicts: Sequence[Verdict], contenders: Sequence[Contender]) -> tuple[str, ...]:
    """One for each of these verdicts on these contenders."""
    by_name = {entry.name: entry for entry in contenders}
    return tuple(_sentence(each, by_name) for each in verdicts)


def verdict_of(bench: Bench) -> tuple[str, ...]:
    """The sentences of a bench; as they were written, where it has no verdict as data."""
    return sentences(bench.verdicts, bench.contenders) if bench.verdicts else bench.verdict


def _sentence(verdict: Verdict, contenders: dict[str, Contender]) -> str:
    """What is to be said of one contender. A wrong answer comes before its speed."""
    entry = contenders[verdict.contender]
    if verdict.kind == "failed":
        done = f" after {plural(entry.rounds, 'counted round')}" if entry.rounds else ""
        return f"{entry.name} failed{done}: {entry.error}"
    if verdict.baseline is None:
        return alone(verdict, entry)
    base = contenders[verdict.baseline]
    parts = [_compare(verdict, entry), *entry.unused]
    if entry.difference is not None:
        parts.insert(0, f"{_wrong(entry, base)}, so its speed is that of another answer")
    if verdict.repeats is False:
        parts.insert(0, f"{entry.name} is not deterministic: tokens differ between rounds")
    return "; ".join(parts)


def _wrong(entry: Contender, base: Contender) -> str:
    """Where the tokens differ, counted as people count."""
    assert entry.difference is not None
    position, rows = entry.difference.position + 1, len(entry.turns[0].tokens)
    row = f" of row {entry.difference.row + 1}" if rows > 1 else ""
    return f"{entry.name} does not give the tokens of {base.name} from new token {position}{row} on"


def _compare(verdict: Verdict, entry: Contender) -> str:
    """The ratio of the main phase, then the other one, then where the time goes."""
    main, *others = verdict.phases
    noise = main.standing == "within_noise"
    first = f"{_say_ratio(main)}{' of' if noise else ''} {verdict.baseline} in {main.phase}"
    parts = [f"{entry.name} is {first} ({_figures(main)})"]
    parts += [f"{_say_ratio(other)} in {other.phase} ({_figures(other)})" for other in others]
    text = ", ".join(parts)
    if verdict.same_provider is not None:
        text += f"; both ran on {short_provider(verdict.same_provider)} alone"
    elif main.ratio < 1 and not noise and (cause := _where_the_time_goes(verdict, entry)):
        text += f": {cause}"
    chance = f"the ranges do not overlap, but with only {plural(entry.rounds, 'round')} that may be noise"
    return f"{text}; {chance}" if main.standing == "too_few_rounds" else text


def _say_ratio(found: PhaseVerdict) -> str:
    """`0.41x`, or that the spreads overlap."""
    return "within noise" if found.standing == "within_noise" else f"{times(found.ratio)}x"


def _figures(found: PhaseVerdict) -> str:
    """Medians of both; with their ranges when those are the point."""
    ranged = found.standing == "within_noise"
    ours, theirs = found.tokens_per_second, found.baseline_tokens_per_second
    return f"{_say_speed(ours, ranged)} against {_say_speed(theirs, ranged)} tokens/s"


def _say_speed(found: Spread, ranged: bool = True) -> str:
    """`31.2 (29.0 to 33.1)`."""
    return decimals(found.median) + (f" ({decimals(found.low)} to {decimals(found.high)})" if ranged else "")


def times(value: float) -> str:
    """A ratio with two significant digits, and no exponent above 10."""
    return f"{value:.2g}" if value < 10 else decimals(value)


def alone(verdict: Verdict, entry: Contender) -> str:
    """One contender without a ratio."""
    parts = [
        f"{phase} {_say_speed(speed.tokens_per_second)} tokens/s"
        for phase, speed in (("decode", entry.decode), ("prefill", entry.prefill))
        if speed is not None
    ]
    cause = _where_the_time_goes(verdict, entry)
    told = f"{entry.name}: {listing(parts) or 'no round is complete'}"
    return "; ".join([told, *([cause] if cause else []), *entry.unused])


def _where_the_time_goes(verdict: Verdict, entry: Contender) -> str:
    """The largest part of decode, in words that the figures carry; empty when there is nothing to say."""
    time, why = verdict.time, entry.why
    if time is None:
        return ""
    if time.spender is None or time.share is None:
        return f"where its time goes is not known: {time.unknown_because}"
    if time.spender == "outside_runs":
        return f"{whole_percent(time.share)} of its decode time is outside the session runs"
    assert why is not None
    if time.spender == "outside_nodes":
        said = (
            f"{whole_percent(time.share)} of its {why.phase} time passes outside its {plural(why.nodes, 'node')}, in "
            "waiting for a device at the end of a run or in work around the nodes"
        )
    else:
        said = f"{whole_percent(time.share)} of the host's time in nodes of its {why.phase} runs is in "
        said += _spender(why, time.spender)
    return "; ".join(part for part in (said, _around(why, time.spender)) if part)


def _spender(why: Why, which: str) -> str:
    """The nodes that take most of the node time."""
    if which == "copies":
        size = why.memcpy_bytes_per_token
        moved = "" if size is None else f" ({human_bytes(round(size))} per token)"
        count = plural(why.memcpy_nodes, "Memcpy node")
        return f"{count}{moved}, which synchronise with the device, then copy"
    if which == "nodes_elsewhere":
        names = listing(short_provider(name) for name in why.elsewhere)
        return f"{plural(why.nodes_elsewhere, 'node')} on {names}"
    return f"its own {plural(why.nodes, 'node')}"


def _around(why: Why, told: str) -> str:
    """What goes with the largest part: copies, nodes elsewhere and partitions, or that there are none. `told`: the part
    that was said already.
    """
    if not why.copies and not why.nodes_elsewhere:
        return "nothing is copied and no node is elsewhere"
    parts = []
    if why.nodes_elsewhere and told != "nodes_elsewhere":
        parts.append(f"{plural(why.nodes_elsewhere, 'node')} elsewhere")
    if why.copies and told != "copies":
        parts.append(plural(why.copies, "copy"))
    if why.partitions > 1:
        parts.append(plural(why.partitions, "partition"))
    return listing(parts) if parts else ""


def whole_percent(share: float) -> str:
    """`71 %`; what is not all of it is never 100 %."""
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"
