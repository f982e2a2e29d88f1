"""Bench medians, ratios, noise and verdict, from synthetic and recorded results."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from partita.bench import contenders as comparison
from partita.bench.contenders import (
    Lane,
    build_contenders,
    choose_baseline,
    complete_rounds,
    differ,
    first_difference,
    ratio,
    spread,
)
from partita.bench.records import Contender, RoundResult
from partita.partition_reports.groups import is_memcpy
from partita.partition_reports.outcome import summarise
from partita.partition_reports.records import Report
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import CPU, recorded_facts, report_of


def turn(number: int, step_ms: float = 10.0, **changes: Any) -> RoundResult:
    """A turn of three decode steps; prefill takes five of them."""
    given: dict[str, Any] = {
        "round": number,
        "prefill_ms": (5 * step_ms,),
        "prefill_tokens": 20,
        "decode_ms": (step_ms,) * 3,
        "decode_tokens": 3,
        "decode_outside_ms": 0.3,
        "first_token_ms": 5 * step_ms,
        "tokens": ((5, 6, 7, 8),),
        "peak_rss_bytes": 100 << 20,
    }
    return RoundResult(**(given | changes))


def lane(name: str, steps_ms: list[float], **changes: Any) -> Lane:
    """A contender whose warm-up took 20 times as long as its slowest round. `changes`: of it, or of its turns."""
    own = {key: changes.pop(key) for key in [*changes] if key in RoundResult.model_fields}
    times = (20 * max(steps_ms), *steps_ms)
    turns = tuple(turn(number, ms, **own) for number, ms in enumerate(times))
    chain = tuple(CPU if part == "cpu" else part for part in name.split(","))
    given: dict[str, Any] = {"name": name, "chain": chain, "round_results": turns, "load_seconds": 0.5}
    return Lane(**(given | changes))


def built(*lanes: Lane) -> tuple[Contender, ...]:
    return build_contenders(lanes, choose_baseline(lanes, None))


SLOW, FAST = [20.0, 25.0, 22.0, 21.0, 24.0], [10.0, 11.0, 9.0, 10.0, 12.0]
MIXED, ON_CPU = mixed(), report_of(recorded_facts())


def test_warm_up_is_excluded_from_statistics():
    (only,) = built(lane("cpu", FAST))
    assert only.decode is not None and only.prefill is not None
    assert only.decode.tokens_per_second.median == pytest.approx(100)
    assert only.decode.tokens_per_second.low == pytest.approx(1000 / 12)
    assert only.decode.tokens_per_second.high == pytest.approx(1000 / 9)
    assert (only.decode.runs, only.prefill.runs, only.rounds) == (15, 5, 5)
    assert only.decode.p50_ms == pytest.approx(10)
    assert only.decode.p95_ms == pytest.approx(12)
    assert only.first_token_ms == spread([50, 55, 45, 50, 60])


def test_ratio_is_median_of_per_round_ratios():
    # The machine slows down by four in the last rounds: the medians of the speeds would give another ratio.
    ours = [turn(n, ms) for n, ms in enumerate([20, 20, 20, 80, 80], start=1)]
    theirs = [turn(n, ms) for n, ms in enumerate([10, 10, 40, 40, 40], start=1)]
    found = ratio(ours, theirs, "decode")
    assert found is not None
    assert [found.median, found.low, found.high] == pytest.approx([0.5, 0.5, 2.0])
    assert ratio(ours, [turn(9)], "decode") is None


@pytest.mark.parametrize(
    ("left", "right", "rounds", "standing"),
    [
        ([10, 20], [20, 30], 5, "within_noise"),
        ([10, 20], [21, 30], 5, "differs"),
        ([21, 30], [10, 20], 4, "differs"),
        ([10, 20], [21, 30], 3, "too_few_rounds"),
        ([10, 50], [20, 30], 2, "within_noise"),
        ([1.6], [276], 1, "differs"),
        ([10, 20], [79, 90], 2, "too_few_rounds"),
        ([10, 20], [81, 90], 2, "differs"),
    ],
)
def test_difference_requires_disjoint_ranges_and_enough_rounds(left, right, rounds, standing):
    assert differ(spread(left), spread(right), rounds) == standing


def with_decode_times(memcpy_us: float, other_us: float) -> Report:
    """The report of several providers with these times of every node."""
    timed = [
        tuple(
            node.model_copy(update={"host_us_per_run": memcpy_us if is_memcpy(node) else other_us})
            for node in phase.nodes
        )
        for phase in MIXED.phases
    ]
    phases = (phase.model_copy(update={"nodes": nodes}) for phase, nodes in zip(MIXED.phases, timed, strict=True))
    return MIXED.model_copy(update={"phases": tuple(phases)})


VERDICTS = {
    "speeds and the largest share": (
        (lane("webgpu,cpu", SLOW, observed=MIXED), lane("cpu", FAST, observed=ON_CPU)),
        "webgpu,cpu is 0.48x cpu in decode (45.5 against 100 tokens/s), 0.48x in prefill (*)*"
        # Some microseconds of made-up nodes against steps of milliseconds.
        "% of its decode time is outside its nodes*",
    ),
    "copies": (
        (
            lane("webgpu,cpu", SLOW, observed=with_decode_times(900_000.0, 10.0)),
            lane("cpu", FAST, observed=ON_CPU),
        ),
        "*: over 99 % of decode's node time is in copies, which wait for the device",
    ),
    "no cause for a faster one": (
        (lane("webgpu,cpu", FAST, observed=MIXED), lane("cpu", SLOW, observed=ON_CPU)),
        "webgpu,cpu is 2.1x cpu in decode (100 against 45.5 tokens/s), 2.1x in prefill (400 against 182 tokens/s)",
    ),
    "noise": (
        (lane("webgpu,cpu", FAST, observed=MIXED), lane("cpu", FAST[::-1], observed=ON_CPU)),
        "webgpu,cpu is within noise of cpu in decode (100 (83.3 to 111) against 100 (83.3 to 111) tokens/s), within "
        "noise in prefill (400 (333 to 444) against 400 (333 to 444) tokens/s)",
    ),
    "too few rounds": (
        (lane("webgpu", SLOW[:2], observed=MIXED), lane("cpu", FAST[:2])),
        "*the ranges do not overlap, but 2 rounds are too few to exclude noise",
    ),
    "another package": (
        (
            lane("gqa on cpu", SLOW, chain=(CPU,), package="gqa", observed=ON_CPU),
            lane("gqa16 on cpu", FAST, chain=(CPU,), package="gqa16", observed=ON_CPU),
        ),
        "gqa16 on cpu is 2.1x gqa on cpu in decode (100 against 45.5 tokens/s), 2.1x in prefill (* tokens/s)",
    ),
    "both on the CPU": (
        (
            lane("cuda,cpu", SLOW, observed=ON_CPU, unused_providers=("cuda is not used: why",)),
            lane("cpu", FAST, observed=ON_CPU),
        ),
        "*both ran on CPU only; cuda is not used: why",
    ),
    "other tokens": (
        (lane("webgpu", FAST, tokens=((5, 6, 9, 8),)), lane("cpu", SLOW)),
        "the tokens of webgpu and cpu differ from new token 3 on; their speeds are for different output; webgpu is "
        "2.1x*",
    ),
    "alone": (
        (lane("cpu", FAST, observed=ON_CPU),),
        "cpu: decode 100 (83.3 to 111) tokens/s and prefill 400 (333 to 444) tokens/s",
    ),
    "prefill only": (
        tuple(
            lane(name, ms, decode_ms=(), decode_tokens=0, decode_outside_ms=0.0)
            for name, ms in (("webgpu", SLOW), ("cpu", FAST))
        ),
        "webgpu is 0.48x cpu in prefill (*",
    ),
    "outside the session": (
        (lane("webgpu", SLOW, observed=MIXED, decode_outside_ms=48.0), lane("cpu", FAST)),
        "*: 71 % of its decode time is outside the session runs",
    ),
    "unknown placement": (
        (lane("webgpu", SLOW, summary_missing_reason="the profiled round failed: it hangs"), lane("cpu", FAST)),
        "*: its placement is unknown: the profiled round failed: it hangs",
    ),
    "a failed contender": (
        (lane("qnn", SLOW[:2], error="its process was killed by SIGSEGV"), lane("cpu", FAST)),
        "qnn failed after 2 counted rounds: its process was killed by SIGSEGV",
    ),
}
"""Contenders, and the pattern of the last sentence of the verdict."""


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict_names_ratio_and_cause(case: str) -> None:
    lanes, pattern = VERDICTS[case]
    baseline = choose_baseline(lanes, None)
    *_, text = comparison.sentences(build_contenders(lanes, baseline), baseline)
    assert fnmatchcase(text, pattern), text


def test_tokens_are_compared_with_the_baseline_and_between_rounds():
    first, base = built(lane("webgpu", FAST, tokens=((5, 6, 9, 8),)), lane("cpu", SLOW))
    assert first.same_tokens is False and first.difference is not None
    assert (first.difference.position, first.difference.token, first.difference.baseline_token) == (2, 9, 7)
    shaky = lane("webgpu", SLOW)
    last = shaky.round_results[-1].model_copy(update={"tokens": ((5, 6, 7, 1),)})
    shaky.round_results = (*shaky.round_results[:-1], last)
    first, base = built(shaky, lane("cpu", FAST))
    assert (first.repeatable, first.same_tokens, base.repeatable, base.same_tokens) == (False, True, True, None)
    (text,) = comparison.sentences((first, base), "cpu")
    assert "webgpu is not deterministic: its tokens differ between rounds" in text


def test_first_difference_is_earliest_position_across_rows():
    later, shorter = first_difference([(1, 2, 3), (1, 2)], [(1, 2, 4), (1, 3)]), first_difference([(1,)], [(1, 4)])
    assert later is not None and (later.row, later.position, later.token, later.baseline_token) == (1, 1, 2, 3)
    assert shorter is not None and (shorter.position, shorter.token, shorter.baseline_token) == (1, None, 4)
    assert first_difference([(1, 2)], [(1, 2), (5, 6)]) is None, "rows of one package only do not count"


def test_baseline_is_requested_then_cpu_then_first_successful():
    lanes = [lane("webgpu", SLOW), lane("cpu", FAST), lane("qnn", FAST, error="it crashed")]
    assert choose_baseline(lanes, None) == "cpu"
    assert choose_baseline(lanes, "webgpu") == "webgpu"
    assert choose_baseline(lanes, "qnn") == "cpu"
    assert choose_baseline(lanes[::2], None) == "webgpu"
    assert choose_baseline(lanes[2:], None) is None
    first, second = (lane(f"{name} on cpu", FAST, chain=(CPU,), package=name) for name in ("gqa", "gqa16"))
    other = lane("gqa16 on webgpu", FAST, chain=("WebGpuExecutionProvider",), package="gqa16")
    assert choose_baseline([other, second, first], None) == "gqa16 on cpu", "the first package on the CPU"
    assert choose_baseline([first, second], "gqa16 on cpu") == "gqa16 on cpu"


def test_rounds_of_figures_are_complete_rounds_of_contenders_that_did_not_fail():
    cut = [lane("webgpu", SLOW), lane("cpu", FAST[:3])]
    assert complete_rounds(cut) == {1, 2, 3}
    assert [entry.rounds for entry in built(*cut)] == [3, 3]
    fast, slow = built(lane("webgpu", SLOW[:1]), lane("cpu", FAST, round_results=(turn(0, 50.0),)))
    assert (fast.rounds, slow.rounds, fast.ratios) == (1, 0, ()), "none is complete"
    assert fast.decode is not None
    lanes = [lane("qnn", SLOW[:2], error="it crashed"), lane("webgpu", SLOW), lane("cpu", FAST)]
    assert complete_rounds(lanes) == {1, 2, 3, 4, 5}
    failed, *others = built(*lanes)
    assert (failed.status, failed.rounds, failed.ratios) == ("failed", 2, ())
    assert [entry.rounds for entry in others] == [5, 5]


def test_contender_summary_matches_partition_report():
    first, _ = built(lane("webgpu,cpu", SLOW, observed=MIXED), lane("cpu", FAST))
    assert first.summary == summarise(MIXED)
    assert first.bounds == tuple(phase.bound.sentence for phase in MIXED.phases if phase.bound)
    (alone,) = built(lane("webgpu,cpu", SLOW, observed=MIXED.model_copy(update={"phases": ()})))
    assert alone.node_share is None and alone.summary is not None and alone.summary.phases == ()
    slow = built(lane("webgpu,cpu", SLOW, observed=with_decode_times(900_000.0, 10.0)), lane("cpu", FAST))
    assert slow[0].node_share == 1
