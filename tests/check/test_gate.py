"""`report check`: limits and baselines; a value that cannot be confirmed fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.check.gate import check, exceeded_limits
from partita.check.requirements import Limits, check_limits, parse_requirement
from partita.errors import ReportError, UsageError
from partita.observations.records import ChainEntry
from partita.options.reports import CheckOptions
from tests.check.test_requirements import PROVIDERS, QUERY, SLOW, having, inside, required
from tests.partition_reports.report_changes import each_node, each_phase, mixed, moved, with_cost
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    MISSING_FIRST_CHAIN,
    PACKAGE,
    mixed_facts,
    recorded_facts,
    report_of,
    shown,
)

OTHER_MODEL = PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32})


def failures(report=None, baseline=None, **options):
    """Failed check -> its detail, of a report with the given limits."""
    compared = ("a.json", baseline) if baseline else None
    result = check(report or mixed(), CheckOptions(**options), "r.json", compared)
    assert result.passed is all(outcome.met for outcome in result.outcomes)
    return {outcome.check: outcome.detail for outcome in result.outcomes if not outcome.met}


# Limits

UNEXPLAINED = sum(entry.reason == "unexplained" and entry.phase == "decode" for entry in mixed().fallbacks)
MET: dict[str, Any] = {
    "max_cpu_nodes": 4,
    "max_copies": 3,
    "max_copy_bytes_per_token": 1544,
    "max_unexplained": UNEXPLAINED,
}


def test_met_limits_report_their_values():
    result = check(mixed(), CheckOptions(**MET), "r.json")
    assert result.passed
    assert [(outcome.check, outcome.detail) for outcome in result.outcomes] == [
        ("--max-cpu-nodes 4", "4 nodes on CPUExecutionProvider in prefill and decode"),
        ("--max-copies 3", "3 Memcpy nodes in decode"),
        ("--max-copy-bytes-per-token 1544", "1,544 bytes per run in 4 copies in decode"),
        (f"--max-unexplained {UNEXPLAINED}", f"{UNEXPLAINED} unexplained fallback in prefill and decode"),
    ]


def test_exceeded_limits_name_values_and_nodes():
    assert UNEXPLAINED, "the sample has some"
    found = failures(**{name: most - 1 for name, most in MET.items()})
    assert [*found.values()][1:3] == [
        "3 Memcpy nodes in decode: Memcpy_token_{0,1} (2), Memcpy",
        "1,544 bytes per run in 4 copies in decode",
    ]
    nodes = "4 nodes on CPUExecutionProvider in prefill and decode: model.rotary_emb/Gather (Gather), "
    assert found["--max-cpu-nodes 3"].startswith(nodes)
    assert "model.layers.0.self_attn/Det (Det)" in found[f"--max-unexplained {UNEXPLAINED - 1}"]
    limits = {name: most - 1 for name, most in MET.items() if name != "max_unexplained"}
    sentences = exceeded_limits(mixed(), Limits(**limits))
    assert sentences == tuple(f"{option}: {text}" for option, text in [*found.items()][:3])
    assert exceeded_limits(mixed(), Limits()) == exceeded_limits(having(phases=()), Limits(max_copies=0)) == ()


def test_exceeded_limit_is_in_verdict_and_text_of_report():
    report = report_of(mixed_facts(), GPU_CHAIN, judge=lambda made: exceeded_limits(made, Limits(max_cpu_nodes=0)))
    assert len(report.exceeded_limits) == 1
    assert "limit exceeded: --max-cpu-nodes 0: 4 nodes" in shown(report)


def test_cpu_nodes_count_in_every_phase():
    """The phase with most known CPU nodes may differ from the phase with most possible ones."""

    def only_decode(**changes):
        return each_phase(
            mixed(),
            lambda phase: {
                "nodes": tuple(having(node, **(changes if phase.name == "decode" else {})) for node in phase.nodes)
            },
        )

    assert failures(only_decode(provider=GPU), max_cpu_nodes=0)["--max-cpu-nodes 0"].startswith(
        "4 nodes on CPUExecutionProvider in prefill: "
    )
    found = failures(only_decode(provider=None), max_cpu_nodes=4)["--max-cpu-nodes 4"]
    assert found.startswith("cannot be confirmed in decode: no source names")


@pytest.mark.parametrize(
    ("bodies", "bytes_hold", "copies_hold"),
    [
        ({"copies": 0}, True, True),
        ({"copies": 2}, False, True),
        ({"copies": None}, False, False),
        ({"copies": 0, "may_have_more_copies": False}, True, True),
        ({"copies": 0, "may_have_more_copies": True}, False, False),
    ],
)
def test_subgraph_copies_of_unknown_size_or_count_are_unconfirmed(bodies, bytes_hold, copies_hold):
    report = inside(**bodies)
    sizes, copies = failures(report, max_copy_bytes_per_token=9999), failures(report, max_copies=99)
    assert not sizes if bytes_hold else "cannot be confirmed in decode" in str(sizes)
    assert not copies if copies_hold else "some copies in control-flow subgraphs may be unknown" in str(copies)
    assert required("phase=decode,copies<=99", report)[0] is copies_hold
    assert failures(report, max_copies=2), "three are in the main graph"


def test_subgraph_nodes_and_copies_count_towards_limits():
    assert not failures(inside(copies=2), max_copies=5)
    (detail,) = failures(inside(copies=2), max_copies=4).values()
    assert detail.startswith("5 Memcpy nodes in decode: ") and detail.endswith(", 2 in control-flow subgraphs")
    report = inside(nodes=0, is_known=False, copies=0)
    (detail,) = failures(report, max_cpu_nodes=99).values()
    unlisted = "nodes in control-flow subgraphs are not listed"
    assert detail == f"cannot be confirmed in prefill and decode: {unlisted}"
    (detail,) = failures(report, max_cpu_nodes=3).values()
    assert detail.startswith("4 nodes on CPUExecutionProvider in prefill and decode")


def test_copy_of_unknown_size_exceeds_limit():
    report = each_phase(
        mixed(), lambda phase: {"copies": (*phase.copies[1:], having(phase.copies[0], bytes_per_run=None))}
    )
    (unknown,) = failures(report, max_copy_bytes_per_token=10**9).values()
    assert "the size of 1 copy is unknown: Memcpy_token_0" in unknown
    (known,) = failures(report, max_copy_bytes_per_token=0).values()
    assert known == "1,032 bytes per run in 4 copies and 1 copy of unknown size in decode"


def test_min_tokens_per_second_checks_decode_speed():
    report = each_phase(mixed(), lambda phase: {"tokens_per_second": 5.0 if phase.name == "decode" else 1.0})
    assert failures(report, min_tokens_per_second=5) == {}
    assert failures(report, min_tokens_per_second=5.1) == {
        "--min-tokens-per-second 5.1": "5.00 tokens/s (1 step: too few for a reliable speed) in decode"
    }
    assert "cannot be confirmed" in failures(SLOW, min_tokens_per_second=0)["--min-tokens-per-second 0"]


def test_cpu_node_limit_contradicts_cpu_preferred_chain():
    check_limits(Limits(max_cpu_nodes=0, max_copies=0, max_copy_bytes_per_token=0), (GPU, CPU))
    check_limits(Limits(max_copies=0, max_copy_bytes_per_token=0), (CPU,))
    with pytest.raises(UsageError, match="contradicts `providers`"):
        check_limits(Limits(max_cpu_nodes=5), (CPU,))


# Invalid and failed reports

BROKEN = having(checks=(having(mixed().checks[0], passed=False), *mixed().checks[1:]))
BROKEN_CHECK = BROKEN.checks[0].name


@pytest.mark.parametrize(
    ("report", "baseline", "detail"),
    [
        (each_phase(mixed(), lambda phase: {"nodes": (), "copies": ()}), None, "nothing can be confirmed"),
        (having(phases=()), None, "nothing can be confirmed"),
        (BROKEN, None, BROKEN_CHECK),
        (mixed(), BROKEN, f"the baseline is inconsistent: {BROKEN_CHECK}"),
        (mixed(), report_of(replace(recorded_facts(), failure="no kernel")), "the run of the baseline failed"),
    ],
)
def test_invalid_report_or_baseline_fails(report, baseline, detail):
    if baseline is not None and baseline is not BROKEN:
        report = report_of(recorded_facts())
    assert detail in failures(report, baseline, max_cpu_nodes=99, max_copies=99)["report"]


LOOSE: tuple[dict[str, Any], ...] = (
    {"max_cpu_nodes": 999},
    {"max_copies": 999, "max_copy_bytes_per_token": 10**9},
    {"max_unexplained": 999},
    {"cache_in_place": True},
    {"min_tokens_per_second": 0},
    {},
)


@pytest.mark.parametrize("limits", LOOSE)
@pytest.mark.parametrize("how", [{"failure": "boom"}, {"finish_reason": "error", "finish_detail": "boom"}])
def test_every_check_fails_on_failed_run(limits, how):
    facts, options = recorded_facts(), CheckOptions(**limits)
    required = [] if limits else [parse_requirement("provider=cpu,share>=0", PROVIDERS)]
    assert check(report_of(facts), options, "r.json", None, required).passed
    bad = report_of(replace(facts, **how))
    found = check(bad, options, "r.json", None, required)
    assert not found.passed and not any(outcome.met for outcome in found.outcomes)
    assert found.outcomes[0].detail.endswith("boom")
    placement = Limits.of(options)
    assert exceeded_limits(bad, placement) or placement == Limits()


def test_interrupted_run_passes():
    assert failures(report_of(replace(recorded_facts(), finish_reason="interrupted")), max_copies=999) == {}


# Baseline


def test_node_moved_to_less_preferred_provider_is_regression():
    now, before = moved(QUERY, chain=MISSING_FIRST_CHAIN), mixed(MISSING_FIRST_CHAIN)
    assert failures(now, before) == {
        "--baseline: nodes": f"1 node: {QUERY} (prefill and decode: WebGpu -> CPU: unexplained)",
        "--baseline: reasons": f"1 node: {QUERY} (prefill and decode: new: unexplained, on CPU)",
    }
    assert failures(now, now) == failures(before, now) == {}


@pytest.mark.parametrize(
    ("was", "now", "left"),
    [
        ("ABC", "ABC", "AB AC BC"),
        ("ABC", "AC", "AC BC"),  # B is no longer in the chain
        ("AC", "ABC", "AB AC"),  # B is new, and better than C
        ("AB", "AC", "AC"),  # B and C have no order: both come second
    ],
)
def test_provider_preference_follows_both_chains(was, now, left):
    def placed(chain, provider):
        entries = tuple(ChainEntry(provider=name, status="active") for name in chain)
        report = mixed(entries).model_copy(update={"fallbacks": ()})
        return each_node(report, lambda node: having(node, provider=provider))

    lower = {
        f"{one}{other}"
        for one in (*was, None)
        for other in (*now, None)
        if "--baseline: nodes" in failures(placed(now, other), placed(was, one))
    }
    assert lower == {*left.split(), *(f"{name}None" for name in was)}


def test_only_new_fallback_nodes_are_a_regression():
    report = mixed()
    first, *rest = report.fallbacks
    assert failures(having(fallbacks=(having(first, reason="not_claimed"), *rest)), report) == {}
    assert first.node in failures(report, having(fallbacks=tuple(rest)))["--baseline: reasons"]


def test_more_copies_and_bytes_are_a_regression():
    def fewer(phase):
        cost = with_cost(phase, copies=3, copy_bytes_at_least=100)
        return {"copies": phase.copies[:-2], "cost": cost}

    found = failures(mixed(), each_phase(mixed(), fewer))
    assert found["--baseline: copy count"].startswith("copies (prefill and decode: 2 -> 4); new: ")
    assert "bytes copied per token (decode: 100 B -> 1.51 KiB)" in found["--baseline: copy bytes"]
    assert failures(each_phase(mixed(), fewer), mixed()) == {}
    for one, other in ((inside(copies=None), inside(copies=0)), (inside(copies=0), inside(copies=None))):
        assert "--baseline: copy count" in failures(one, other), "not confirmed"


def test_copied_bytes_are_compared_per_token():
    """Runs with different token counts are compared by bytes per token."""

    def run(tokens, each):
        cost = {"tokens_per_run": tokens, "copy_bytes_at_least": tokens * each}
        return each_phase(mixed(), lambda phase: {"cost": with_cost(phase, **cost)})

    assert failures(run(8, 100), run(2, 100)) == failures(run(2, 100), run(8, 100)) == {}
    for larger in (run(8, 101), run(2, 101)):
        found = failures(larger, run(4, 100))["--baseline: copy bytes"]
        assert found == "bytes copied per token (prefill and decode: 100 B -> 101 B)"


def test_cache_no_longer_in_place_is_a_regression():
    was = report_of(recorded_facts())

    def with_cache(**changes):
        return having(was, cache=having(was.cache, **changes))

    now, unseen = with_cache(in_place_states=0), with_cache(checked_steps=0)
    assert "-> NOT in place" in failures(now, was)["--baseline: cache"]
    assert failures(now, now) == {}, "it was no better before"
    assert "--baseline: cache" in failures(unseen, was) and failures(was, unseen) == {}


def test_time_is_compared_only_between_similar_runs():
    def at(speed, **changes):
        return each_phase(mixed(), lambda phase: {"tokens_per_second": speed, "profiled": False} | changes)

    def told(now, was, limit):
        return failures(now, was, max_slowdown=limit).get(f"--max-slowdown {limit}")

    fast, slow = at(100.0), at(80.0)
    other = fast.model_copy(update={"environment": fast.environment.model_copy(update={"cpu": "Another CPU"})})
    many = at(100.0, tokens=30, steps=10)
    assert failures(slow, fast) == failures(slow, fast, max_slowdown=0.25) == {}
    assert told(slow, fast, 0.2) == "80.0 tokens/s, 100 in the baseline: 1.25 times the time per token"
    unknown = "cannot be confirmed: "
    assert told(slow, other, 0.5) == f"{unknown}the runs were on different processors"
    assert told(slow, fast.model_copy(update={"phases": fast.phases[:1]}), 0.5).startswith(f"{unknown}decode here, ")
    assert told(at(80.0, profiled=True), fast, 0.5).startswith(f"{unknown}every step of decode was profiled here")
    assert told(at(80.0, tokens=10, steps=10), many, 0.5).startswith(f"{unknown}1.00 active rows per step here, 3.00")
    with pytest.raises(UsageError, match="needs `baseline`"):
        failures(slow, max_slowdown=0.5)


def test_baseline_with_other_phases_chain_or_model_fails():
    assert failures(having(phases=mixed().phases[:1]), mixed()) == {
        "--baseline: phases": "phases (request: prefill, decode -> prefill)"
    }
    baseline = having(chain=tuple(reversed(GPU_CHAIN)))
    assert f"{CPU} -> {GPU}" in failures(mixed(), baseline)["--baseline: preferred provider"]
    other = report_of(recorded_facts(), package=OTHER_MODEL)
    with pytest.raises(
        ReportError, match=r"a\.json cannot be a baseline for r\.json: only .*; give a report of the same model"
    ):
        failures(mixed(), other)
