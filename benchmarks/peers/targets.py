"""Ours against each peer, and against what was aimed at. Pure: from records alone.

Ratios within one group are medians of the ratios of the rounds; between groups, which ran one after the other, they are
ratios of medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.peers.records import Contender, Machine, ShapeResult, Spread, Work

DEFAULT_INT4, SMALL_INT4, PAIR = "partita int4-b64", "partita int4-b128", "partita int4-b64-head8+int8"
GENAI_INT4, Q4_0, PURE = "genai int4", "llama q4_0", "llama q4_0-pure"
"""llama.cpp's Q4_0 has a wider head (Q6_K), as our pair has (int8): the two lose about the same. Its pure form reads
4.5 bits for a weight, as blocks of 128 do.
"""
WIDE_PEERS = ("genai fp32", "optimum fp32")
"""ONNX Runtime's peers have no 16-bit form that its CPU provider runs whole."""


def beside(shape: ShapeResult) -> Iterator[tuple[str, str, int, float, float]]:
    """Each of ours, each other one of its width, a prompt, and how many times as fast ours is in prefill and decode."""
    for ours in shape.contenders:
        for theirs in shape.contenders:
            if ours.peer == "partita" != theirs.peer and ours.bits == theirs.bits:
                for mine, other in _pairs(ours, theirs):
                    speeds = (ratios(mine, other, rates).median for rates in (prefill, decode))
                    yield (ours.name, theirs.name, mine.prompt_tokens, *speeds)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure beside its target."""

    what: str
    value: float
    target: float
    at_least: bool

    @property
    def met(self) -> bool:
        """The target is reached, at the precision that is printed."""
        value, target = round(self.value, 3), self.target
        return value >= target if self.at_least else value <= target

    @property
    def words(self) -> str:
        """`met`, or by how much it is missed."""
        if self.met:
            return "met"
        share = 1 - self.value / self.target if self.at_least else self.value / self.target - 1
        return f"missed by {100 * share:.0f} %"


def ratios(ours: Work, theirs: Work, rates: Callable[[Work], list[float]]) -> Spread:
    """How many times as fast ours is: by round where both have as many, else of the medians."""
    left, right = rates(ours), rates(theirs)
    if len(left) == len(right):
        return Spread.of([mine / other for mine, other in zip(left, right, strict=True)])
    return Spread.of([statistics.median(left) / statistics.median(right)])


def prefill(work: Work) -> list[float]:
    """Prompt tokens per second."""
    return work.prefill_rates


def decode(work: Work) -> list[float]:
    """New tokens per second."""
    return work.decode_rates


def verdicts(shape: ShapeResult, machine: Machine) -> list[Verdict]:
    """All that can be said of this shape."""
    return [
        *_speed(shape, DEFAULT_INT4, GENAI_INT4, 2.5, 4.0),
        *_speed(shape, SMALL_INT4, GENAI_INT4, 2.5, 4.0),
        *_speed(shape, SMALL_INT4, PURE, 1.1, 1.1),
        *_speed(shape, PAIR, GENAI_INT4, 2.5, 4.0),
        *_speed(shape, PAIR, Q4_0, 1.0, 1.1),
        *_start(shape),
        *_memory(shape),
        *_bandwidth(shape, machine),
        *_wide(shape),
        *_export(shape),
    ]


def _speed(
    shape: ShapeResult, ours: str, theirs: str, decode_target: float, prefill_target: float
) -> Iterator[Verdict]:
    for phase, rates, target in (("decode", decode, decode_target), ("prefill", prefill, prefill_target)):
        for mine, other in _pairs(shape.named(ours), shape.named(theirs)):
            ratio = ratios(mine, other, rates).median
            yield Verdict(f"{phase} after {mine.prompt_tokens} tokens, {ours} / {theirs}", ratio, target, True)


def _pairs(ours: Contender | None, theirs: Contender | None) -> Iterator[tuple[Work, Work]]:
    """Works of the same prompt that both have."""
    for mine in ours.works if ours else ():
        other = theirs.work(mine.prompt_tokens) if theirs else None
        if other is not None and mine.turns:
            yield mine, other


def first_token(entry: Contender) -> float | None:
    """Median seconds of load and first prompt."""
    return statistics.median([each.first_token_seconds for each in entry.starts]) if entry.starts else None


def _start(shape: ShapeResult) -> Iterator[Verdict]:
    theirs = shape.named(Q4_0)
    for name in (DEFAULT_INT4, SMALL_INT4, PAIR):
        ours = shape.named(name)
        mine, other = ours and first_token(ours), theirs and first_token(theirs)
        if mine and other:
            yield Verdict(f"time to first token with load, {name} / {Q4_0}", mine / other, 1.0, False)


def _memory(shape: ShapeResult) -> Iterator[Verdict]:
    for entry in shape.contenders:
        if entry.peer == "partita" and entry.starts and entry.file_bytes:
            peak = statistics.median([each.peak_rss_bytes for each in entry.starts])
            yield Verdict(f"peak memory / package, {entry.name}", peak / entry.file_bytes, 1.2, False)


def decode_rate(entry: Contender, work: Work) -> float | None:
    """1e9 bytes per second that a decode step reads: packed weights, and the cache at half of the answer."""
    if entry.decode_bytes is None:
        return None
    cache = (entry.cache_token_bytes or 0) * (work.prompt_tokens + work.new_tokens / 2)
    return (entry.decode_bytes + cache) * statistics.median(work.decode_rates) / 1e9


def _bandwidth(shape: ShapeResult, machine: Machine) -> Iterator[Verdict]:
    for entry in shape.contenders:
        for work in entry.works:
            rate = decode_rate(entry, work) if work.turns else None
            if rate is not None and entry.bits <= 8:
                what = f"read bandwidth in decode after {work.prompt_tokens} tokens, {entry.name}"
                yield Verdict(what, rate / machine.read_gbps, 0.85, True)


def _wide(shape: ShapeResult) -> Iterator[Verdict]:
    for name in ("partita fp16", "partita bf16"):
        for phase, rates in (("decode", decode), ("prefill", prefill)):
            yield from _against_best(shape, name, phase, rates)


def _against_best(shape: ShapeResult, name: str, phase: str, rates: Callable[[Work], list[float]]) -> Iterator[Verdict]:
    """Ours against the fastest of ONNX Runtime's peers, at each prompt."""
    ours = shape.named(name)
    for work in ours.works if ours else ():
        found = [
            (statistics.median(rates(other)), peer)
            for peer in WIDE_PEERS
            if (entry := shape.named(peer)) and (other := entry.work(work.prompt_tokens))
        ]
        if found and work.turns:
            rate, peer = max(found)
            what = f"{phase} after {work.prompt_tokens} tokens, {name} / {peer} (best of ONNX Runtime's peers)"
            yield Verdict(what, statistics.median(rates(work)) / rate, 1.0, True)


def _export(shape: ShapeResult) -> Iterator[Verdict]:
    ours, theirs = shape.named(DEFAULT_INT4), shape.named(GENAI_INT4)
    if ours and theirs and ours.written and theirs.written:
        mine, other = ours.written, theirs.written
        if not (mine.disturbed or other.disturbed):
            yield Verdict(f"seconds of export, {ours.name} / {theirs.name}", mine.seconds / other.seconds, 1.0, False)
        memory = mine.peak_rss_bytes / other.peak_rss_bytes
        yield Verdict(f"peak memory of export, {ours.name} / {theirs.name}", memory, 0.5, False)
