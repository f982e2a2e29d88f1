"""Bench medians, ratios, noise and verdict, from synthetic and recorded results."""

from __future__ import annotations

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
from partita.partition_reports.outcome import headline, summarise
from partita.partition_reports.records import Report
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.samples import CPU, recorded_facts, report_of

TOKENS = ((5, 6, 7, 8),)
ROUNDS = 5


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
        "tokens": TOKENS,
        "peak_rss_bytes": 100 << 20,
    }
    return RoundResult(**(given | changes))


def chain_of(name: str) -> tuple[str, ...]:
    return tuple(CPU if part == "cpu" else part for part in name.split(","))


def lane(name: str, steps_ms: list[float], **changes: Any) -> Lane:
    """A contender whose warm-up took 20 times as long as its slowest round."""
    turns = (turn(0, 20 * max(steps_ms)), *(turn(number, ms) for number, ms in enumerate(steps_ms, start=1)))
    given: dict[str, Any] = {"name": name, "chain": chain_of(name), "round_results": turns, "load_seconds": 0.5}
    return Lane(**(given | changes))


def sentences(*lanes: Lane, asked: str | None = None) -> tuple[str, ...]:
    baseline = choose_baseline(lanes, asked)
    contenders = build_contenders(lanes, baseline)
    return comparison.sentences(contenders, baseline)


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
        ([1.6, 1.7], [250, 276], 2, "differs"),
        ([1.6], [276], 1, "differs"),
        ([10, 20], [79, 90], 2, "too_few_rounds"),
        ([10, 20], [81, 90], 2, "differs"),
    ],
)
def test_difference_requires_disjoint_ranges_and_enough_rounds(left, right, rounds, standing):
    ours, theirs = spread(left), spread(right)
    assert ours is not None and theirs is not None
    assert differ(ours, theirs, rounds) == standing


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


def test_verdict_names_speeds_and_largest_share_of_time():
    (text,) = sentences(lane("webgpu,cpu", SLOW, observed=MIXED), lane("cpu", FAST, observed=ON_CPU))
    assert text.startswith("webgpu,cpu is 0.48x cpu in decode (45.5 against 100 tokens/s), 0.48x in prefill (")
    # Some microseconds of made-up nodes against steps of milliseconds.
    assert "% of its decode time is outside its nodes" in text


def test_verdict_names_copies_as_largest_share_of_node_time():
    lanes = lane("webgpu,cpu", SLOW, observed=with_decode_times(900_000.0, 10.0)), lane("cpu", FAST, observed=ON_CPU)
    (text,) = sentences(*lanes)
    assert text.endswith(": over 99 % of decode's node time is in copies, which wait for the device")
    assert built(*lanes)[0].node_share == 1


def test_verdict_gives_cause_only_for_slower_contender():
    faster = sentences(lane("webgpu,cpu", FAST, observed=MIXED), lane("cpu", SLOW, observed=ON_CPU))
    equal = sentences(lane("webgpu,cpu", FAST, observed=MIXED), lane("cpu", FAST[::-1], observed=ON_CPU))
    assert faster[0].startswith("webgpu,cpu is 2.1x cpu in decode") and "% of" not in faster[0]
    assert equal[0].startswith("webgpu,cpu is within noise of cpu in decode (100 (83.3 to 111) against 100 (")
    assert "x cpu" not in equal[0] and "% of" not in equal[0]
    ratios = built(lane("webgpu,cpu", FAST), lane("cpu", FAST))[0].ratios
    assert [ratio.significance for ratio in ratios] == ["within_noise", "within_noise"]


def test_verdict_reports_too_few_rounds_to_exclude_noise():
    (said,) = sentences(lane("webgpu", SLOW[:2], observed=MIXED), lane("cpu", FAST[:2]))
    assert said.endswith("the ranges do not overlap, but 2 rounds are too few to exclude noise")


def test_packages_are_compared_on_the_same_provider():
    first = lane("gqa on cpu", SLOW, chain=(CPU,), package="gqa", observed=ON_CPU)
    second = lane("gqa16 on cpu", FAST, chain=(CPU,), package="gqa16", observed=ON_CPU)
    (said,) = sentences(first, second)
    assert said.startswith("gqa16 on cpu is 2.1x gqa on cpu in decode") and "both ran" not in said
    other = lane("gqa16 on webgpu", FAST, chain=("WebGpuExecutionProvider",), package="gqa16")
    assert choose_baseline([other, second, first], None) == "gqa16 on cpu", "the first package on the CPU"
    assert choose_baseline([first, second], "gqa16 on cpu") == "gqa16 on cpu"


def test_verdict_reports_both_contenders_ran_on_cpu_only():
    note = "cuda is not used: library_missing: libcublas"
    (said,) = sentences(lane("cuda,cpu", SLOW, observed=ON_CPU, unused=(note,)), lane("cpu", FAST, observed=ON_CPU))
    assert "both ran on CPU only" in said and said.endswith(note)


def test_verdict_reports_token_difference_before_speed():
    wrong = lane("webgpu", FAST)
    turns = tuple(entry.model_copy(update={"tokens": ((5, 6, 9, 8),)}) for entry in wrong.round_results)
    (said,) = sentences(Lane(name="webgpu", chain=("webgpu",), round_results=turns), lane("cpu", SLOW))
    assert said.startswith(
        "the tokens of webgpu and cpu differ from new token 3 on; their speeds are for different output; webgpu is 2.1x"
    )
    first, _ = built(Lane(name="webgpu", chain=("webgpu",), round_results=turns), lane("cpu", SLOW))
    assert first.same_tokens is False and first.difference is not None
    assert (first.difference.position, first.difference.token, first.difference.baseline_token) == (2, 9, 7)


def test_verdict_reports_nondeterministic_tokens():
    shaky = lane("webgpu", SLOW)
    turns = (*shaky.round_results[:-1], shaky.round_results[-1].model_copy(update={"tokens": ((5, 6, 7, 1),)}))
    first, base = built(Lane(name="webgpu", chain=("webgpu",), round_results=turns), lane("cpu", FAST))
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


def test_incomplete_round_is_excluded_for_all_contenders():
    cut = [lane("webgpu", SLOW), lane("cpu", FAST[:3])]
    assert complete_rounds(cut) == {1, 2, 3}
    assert [entry.rounds for entry in built(*cut)] == [3, 3]


def test_partial_results_are_shown_before_first_complete_round():
    fast, slow = built(lane("webgpu", SLOW[:1]), lane("cpu", FAST, round_results=(turn(0, 50.0),)))
    assert (fast.rounds, slow.rounds, fast.ratios) == (1, 0, ())
    assert fast.decode is not None


def test_failed_contender_does_not_reduce_rounds_of_others():
    lanes = [lane("qnn", SLOW[:2], error="its process was killed by SIGSEGV"), lane("webgpu", SLOW), lane("cpu", FAST)]
    assert complete_rounds(lanes) == {1, 2, 3, 4, 5}
    failed, *others = built(*lanes)
    assert (failed.status, failed.rounds, failed.ratios) == ("failed", 2, ())
    assert [entry.rounds for entry in others] == [5, 5]
    said = sentences(*lanes)
    assert said[0] == "qnn failed after 2 counted rounds: its process was killed by SIGSEGV"
    assert said[1].startswith("webgpu is 0.48x cpu")


def test_single_contender_has_no_ratio():
    (said,) = sentences(lane("cpu", FAST, observed=ON_CPU))
    assert said == "cpu: decode 100 (83.3 to 111) tokens/s and prefill 400 (333 to 444) tokens/s"


def test_verdict_uses_prefill_ratio_without_decode_steps():
    bare = {"decode_ms": (), "decode_tokens": 0, "decode_outside_ms": 0.0}
    lanes = [
        Lane(name=name, chain=chain_of(name), round_results=tuple(turn(n, ms, **bare) for n in range(6)))
        for name, ms in (("webgpu", 20.0), ("cpu", 10.0))
    ]
    first, _ = built(*lanes)
    assert first.decode is None and first.decode_outside_share is None
    assert sentences(*lanes)[0].startswith("webgpu is 0.5x cpu in prefill (")


def test_verdict_names_time_outside_session_runs_as_largest_share():
    slow = lane("webgpu", SLOW, observed=MIXED)
    turns = tuple(
        entry.model_copy(update={"decode_outside_ms": 0.8 * sum(entry.decode_ms)}) for entry in slow.round_results
    )
    lanes = Lane(name="webgpu", chain=("webgpu",), round_results=turns, observed=MIXED), lane("cpu", FAST)
    assert sentences(*lanes)[0].endswith(": 80 % of its decode time is outside the session runs")


def test_verdict_reports_unknown_placement():
    (said,) = sentences(
        lane("webgpu", SLOW, report_missing_reason="the profiled round failed: it hangs"), lane("cpu", FAST)
    )
    assert said.endswith(": its placement is unknown: the profiled round failed: it hangs")


def test_contender_summary_matches_partition_report():
    first, _ = built(lane("webgpu,cpu", SLOW, observed=MIXED), lane("cpu", FAST))
    assert first.summary == summarise(MIXED) and first.headline == headline(MIXED)
    assert first.bounds == tuple(phase.bound.sentence for phase in MIXED.phases if phase.bound)
    (alone,) = built(lane("webgpu,cpu", SLOW, observed=MIXED.model_copy(update={"phases": ()})))
    assert alone.node_share is None and alone.summary is not None and alone.summary.phases == ()
