"""The answer of a bench as data: who is faster and by how much, whether the spread allows to say so, and where the time
goes. Pure; `words` puts it into sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.bench.records import Contender, PhaseVerdict, Ratio, Spender, TimeVerdict, Verdict, Why
from partita.observations.names import CPU

MOSTLY = 0.5
"""Part of decode outside the session runs, or of it outside the nodes, from which that is what there is to say."""


def judge(contenders: Sequence[Contender], baseline: str | None) -> tuple[Verdict, ...]:
    """One verdict per contender but the baseline; that of the baseline first when nothing is compared with it."""
    base = next((entry for entry in contenders if entry.name == baseline), None)
    found = [_judge_one(entry, base) for entry in contenders if entry is not base]
    compared = any(entry.ratios for entry in contenders)
    return tuple(found if compared or base is None else [alone(base), *found])


def _judge_one(entry: Contender, base: Contender | None) -> Verdict:
    """One contender beside the baseline."""
    if entry.status == "failed":
        return Verdict(contender=entry.name, baseline=None, kind="failed")
    if base is None or not entry.ratios:
        return alone(entry)
    *others, main = entry.ratios  # of decode, or of prefill where nothing was decoded
    return Verdict(
        contender=entry.name,
        baseline=base.name,
        kind="compared",
        same_tokens=entry.same_tokens,
        repeats=entry.repeats,
        phases=tuple(_weigh(entry, base, ratio) for ratio in (main, *others)),
        same_provider=_same_provider(entry, base),
        time=_where_the_time_goes(entry),
    )


def alone(entry: Contender) -> Verdict:
    """One contender without a ratio."""
    return Verdict(
        contender=entry.name,
        baseline=None,
        kind="alone",
        repeats=entry.repeats,
        time=_where_the_time_goes(entry),
    )


def _weigh(entry: Contender, base: Contender, found: Ratio) -> PhaseVerdict:
    """Who is faster in one phase, where the spread allows to say so."""
    ours, theirs = (entry.decode, base.decode) if found.phase == "decode" else (entry.prefill, base.prefill)
    assert ours is not None and theirs is not None
    told = found.standing == "differs" and found.median != 1
    return PhaseVerdict(
        phase=found.phase,
        faster=None if not told else entry.name if found.median > 1 else base.name,
        ratio=found.median,
        ratio_low=found.low,
        ratio_high=found.high,
        standing=found.standing,
        tokens_per_second=ours.tokens_per_second,
        baseline_tokens_per_second=theirs.tokens_per_second,
    )


def _same_provider(entry: Contender, base: Contender) -> str | None:
    """The one provider that both ran on alone, with the same package, so that a ratio is none of two providers."""
    ours, theirs = entry.why, base.why
    if entry.package != base.package or ours is None or theirs is None:
        return None
    if ours.nodes_elsewhere or theirs.nodes_elsewhere or ours.provider != theirs.provider:
        return None
    return ours.provider


def _where_the_time_goes(entry: Contender) -> TimeVerdict | None:
    """The largest part of decode; None where that is no question, as on the CPU provider alone."""
    outside, why = entry.decode_outside_share, entry.why
    if outside is not None and outside > MOSTLY:
        return TimeVerdict(spender="outside_runs", share=outside)
    if why is None:
        return TimeVerdict(spender=None, unknown_because=entry.why_unknown) if entry.why_unknown else None
    if why.provider == CPU and not why.copies and not why.nodes_elsewhere:
        return None
    parts = list(_known_parts(why))
    if not parts:
        return TimeVerdict(spender=None, unknown_because="no run was profiled")
    if entry.node_share is not None and entry.node_share < MOSTLY:
        return TimeVerdict(spender="outside_nodes", share=1 - entry.node_share)
    share, spender = max(parts, key=lambda part: part[0])
    return TimeVerdict(spender=spender, share=share)


def _known_parts(why: Why) -> Iterator[tuple[float, Spender]]:
    """Share of every part of the node time that is known."""
    if why.wait_share is not None and why.memcpy_nodes:
        yield why.wait_share, "copies"
    if why.own_share is not None:
        yield why.own_share, "own_nodes"
    if why.elsewhere_share is not None and why.nodes_elsewhere:
        yield why.elsewhere_share, "nodes_elsewhere"
