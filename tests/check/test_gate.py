"""`report check`: requirements, limits and baselines; a value that cannot be confirmed fails."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from partita.check.gate import Gate, check
from partita.check.measures import exceeded_limits, find
from partita.check.requirements import FIELDS, Limits, Vocabulary, parse_requirement
from partita.compare.reports import is_less_preferred
from partita.errors import ReportError, UsageError
from partita.observations.records import ChainEntry
from partita.options.fields import describe_fields
from partita.options.reports import CheckCommand
from partita.partition_reports.cost import speculation_figures
from partita.partition_reports.records import Cache, CacheState, SubgraphNode, Subgraphs
from tests.conftest import REPOSITORY
from tests.partition_reports.report_changes import compiled, each_node, each_phase, mixed, moved, with_cost
from tests.partition_reports.samples import (
    CPU,
    GPU,
    GPU_CHAIN,
    MISSING_FIRST_CHAIN,
    NO_GPU_CHAIN,
    PACKAGE,
    recorded_facts,
    report_of,
)
from tests.partition_reports.test_speculation_section import NGRAM, STEPS

NAMES = {"webgpu": GPU, "cpu": CPU}
WORDS = Vocabulary(lambda name: NAMES.get(name, name), ("no_kernel_op", "cpu_preferred", "unexplained"))
QUERY = "model.layers.0.self_attn.q_proj/MatMul"
LAYER = "model.layers.0.mlp/Mul"


def required(text, report=None):
    """Whether a requirement holds, and what is said."""
    findings = find(parse_requirement(text, WORDS), report or mixed())
    return all(holds for holds, _ in findings), "; ".join(said for _, said in findings)


def failures(gate, report=None, baseline=None):
    result = check(report or mixed(), gate, "r.json", ("a.json", baseline) if baseline else None)
    return {outcome.check: outcome.detail for outcome in result.outcomes if not outcome.met}


# Nodes of the file: 9, of which Gather, Concat and Det are on the CPU. The Transpose on the CPU is ONNX Runtime's own.
@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("provider=webgpu,share>=0.66", True),
        ("provider=webgpu,share>0.67", False),
        ("provider=webgpu,share>=66%", True),
        ("provider=cpu,nodes<=4", True),
        ("provider=cpu,nodes<4", False),
        ("provider=cpu,nodes=4", True),
        ("provider!=webgpu,nodes=4", True),
        ("provider = webgpu , nodes >= 6", True),
        ("op=MatMul,provider=webgpu,share=1", True),
        ("op=Gather,provider=webgpu,share==0.5", True),
        ("op!=Gather,provider=webgpu,share>=0.7", True),
        ("module=rotary_emb,provider=cpu,share=50%", True),
        ("module=layers.0,provider=cpu,nodes=1", True),
        ("module=layers,provider=cpu,nodes=1", True),
        ("module=rotary,provider=cpu,nodes=0", False),  # a part of a path is a whole word of it
        ("reason=unexplained,nodes=0", False),
        ("reason=no_kernel_op,nodes=1", True),
        ("phase=decode,copies<=4", True),
        ("phase=decode,copies<=3", False),
        ("phase=run,copies<=99", False),
        ("phase!=run,copies<=4", True),
        ("provider=webgpu,nodes>=6,share>=0.6", True),
        ("provider=webgpu,nodes>=6,share>=0.7", False),
    ],
)
def test_requirement_conditions_and_measures_are_evaluated(text, holds):
    assert required(text)[0] is holds, required(text)


def test_failed_requirement_names_value_nodes_and_reasons():
    assert required("op=Gather,provider=webgpu,share>=0.9") == (
        False,
        "share 0.5 in prefill and decode, without model.rotary_emb/Gather (Gather on CPU: no_kernel_op)",
    )
    _, said = required("provider=cpu,nodes=0")
    assert said.startswith("nodes 4 in prefill and decode: model.rotary_emb/Gather (Gather on CPU: no_kernel_op), ")


def test_unknown_values_fail_requirement():
    lost = each_node(mixed(), lambda n: n.model_copy(update={"provider": None if n.name == QUERY else n.provider}))
    for text in ("op=MatMul,provider=webgpu,share=1", "op=MatMul,provider!=cpu,share=1"):
        assert not required(text, lost)[0]
    assert "no node of the file is selected" in required("op=Conv,provider=webgpu,share<=1")[1]
    slow = each_phase(mixed(), lambda phase: {"tokens_per_second": None})
    assert "tokens_per_second cannot be confirmed" in required("tokens_per_second>=0", slow)[1]


def test_requirement_on_unknown_module_fails():
    """A renamed or misspelled module selects no node, so `nodes=0` would always hold."""
    for part in ("provider=cpu", "provider=webgpu", "reason=unexplained"):
        assert required(f"module=self_atn,{part},nodes=0") == (
            False,
            "nodes cannot be confirmed in prefill and decode: no phase has a node of this module",
        )
    for text in ("module=self_attn,provider=cpu,nodes=1", "module=self_atn,nodes=0"):
        assert required(text)[0], text
    for text in ("op=Conv,nodes=0", "op=Conv,provider=cpu,nodes=0"):
        assert required(text)[0], "that an operator is not there is what is asked for"


def test_subgraph_nodes_are_reported_as_not_counted():
    report = each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(nodes=5, copies=None)})
    assert "5 nodes in control-flow subgraphs not counted" in required("provider=webgpu,share>=0.6", report)[1]
    assert not required("copies<=99", report)[0], "nobody counted the copies inside"


def test_expanded_function_counts_on_least_preferred_provider():
    parts = tuple(
        SubgraphNode(name=name, op_type=name, provider=place, replaces=("map",))
        for name, place in (("At", GPU), ("Insert", CPU))
    )
    function = mixed().phases[0].file_nodes[0].model_copy(update={"name": "map", "op_type": "SequenceMap"})
    bodies = Subgraphs(nodes=3, function_nodes=parts, copies=0)
    report = each_phase(mixed(), lambda phase: {"file_nodes": (*phase.file_nodes, function), "subgraphs": bodies})
    held, said = required("op=SequenceMap,provider=webgpu,share>=1", report)
    assert not held and "share 0 in" in said and said.startswith("share 0")
    assert "1 node in control-flow subgraphs not counted" in said
    assert required("op=SequenceMap,provider=cpu,nodes=1", report)[0], "on the least preferred of its providers"


def test_subgraph_copies_count_towards_max_copies():
    report = each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(nodes=5, copies=2)})
    assert not failures(Gate(limits=Limits(max_copies=5)), report)
    (detail,) = failures(Gate(limits=Limits(max_copies=4)), report).values()
    assert detail.startswith("5 Memcpy nodes in decode: ") and detail.endswith(", 2 in control-flow subgraphs")


@pytest.mark.parametrize(
    ("inside", "bytes_hold", "copies_hold"),
    [
        ({"copies": 0}, True, True),
        ({"copies": 2}, False, True),
        ({"copies": None}, False, False),
        ({"copies": 0, "may_have_more_copies": False}, True, True),
        ({"copies": 0, "may_have_more_copies": True}, False, False),
    ],
)
def test_subgraph_copies_of_unknown_size_or_count_are_unconfirmed(inside, bytes_hold, copies_hold):
    report = each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(nodes=5, **inside)})
    sizes, copies = failures(SIZES, report), failures(COPIES, report)
    assert not sizes if bytes_hold else "cannot be confirmed in decode" in str(sizes)
    assert not copies if copies_hold else "some copies in control-flow subgraphs may be unknown" in str(copies)
    assert required("phase=decode,copies<=99", report)[0] is copies_hold
    assert failures(Gate(limits=Limits(max_copies=2)), report), "three are in the main graph"


SIZES, COPIES = Gate(limits=Limits(max_copy_bytes_per_token=9999)), Gate(limits=Limits(max_copies=99))


def test_unlisted_subgraph_nodes_fail_max_cpu_nodes():
    report = each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(nodes=0, is_known=False, copies=0)})
    (detail,) = failures(Gate(limits=Limits(max_cpu_nodes=99)), report).values()
    assert detail == "cannot be confirmed in decode: nodes in control-flow subgraphs are not listed"
    (detail,) = failures(Gate(limits=Limits(max_cpu_nodes=3)), report).values()
    assert detail.startswith("4 nodes on CPUExecutionProvider in decode")


FUSED = ("model.layers.0.mlp/Mul", "model.layers.0.self_attn.q_proj/MatMul", "lm_head/MatMul")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("op=MatMul,provider=cpu,share=1", True),
        ("op=Mul,provider=cpu,share=1", True),
        ("op!=MatMul,provider=cpu,share<=0.572", True),  # Mul, Gather, Concat and Det of 7, without the two MatMul
        ("op!=MatMul,provider=cpu,share>=0.571", True),
        ("op=CompiledSubgraph,provider=cpu,share=1", True),
        ("op=CompiledSubgraph,nodes=3", True),
        ("module=lm_head,provider=cpu,nodes=0", False),
        ("module=q_proj,provider=cpu,nodes=1", True),
        ("module=layers.0,provider=cpu,share=1", True),
        ("module=embed_tokens,provider=cpu,nodes=0", True),
        ("op=Mul,module=lm_head,provider=cpu,nodes=0", True),
    ],
)
def test_compiled_node_counts_per_operator_and_module(text, holds):
    fused = compiled(1, *FUSED, provider=CPU)(mixed())
    assert required(text, fused)[0] is holds, required(text, fused)


def test_folded_nodes_are_excluded_from_share():
    folded = {"state": "folded", "provider": None, "ran_as": ()}
    phases = tuple(
        phase.model_copy(
            update={
                "file_nodes": tuple(r.model_copy(update=folded if r.provider == CPU else {}) for r in phase.file_nodes)
            }
        )
        for phase in mixed().phases
    )
    report = mixed().model_copy(update={"phases": phases})
    assert required("provider=webgpu,share=1", report)[0] and required("op=Det,nodes=0", report)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provder=webgpu,share>=1", "unknown field 'provder' (did you mean 'provider'?)"),
        ("speed>=1", f"known: {', '.join(FIELDS)}"),
        ("provider=webgpu", "it has no measure"),
        ("share>=0.5", "share needs provider or reason"),
        ("provider>webgpu,nodes=1", "provider takes = or !="),
        ("provider=,nodes=1", "provider has no value"),
        ("phase=decod,copies=0", "did you mean 'decode'"),
        ("reason=unexplaind,nodes=0", "did you mean 'unexplained'"),
        ("copies<=many", "copies is compared with a number"),
        ("copies<=nan", "compared with a number"),
        ("copies<=inf", "compared with a number"),
        ("provider=cpu,share>=95", "between 0 and 1"),
        ("provider=cpu,copies<=1", "copies measures a whole phase"),
        ("phase=decode,unavailable=0", "unavailable measures a whole report; use it without phase"),
        ("", "is not FIELD OP VALUE"),
        ("nodes", "is not FIELD OP VALUE"),
        ("nodes=1,", "is not FIELD OP VALUE"),
    ],
)
def test_invalid_requirement_raises_single_line_usage_error(text, words):
    with pytest.raises(UsageError) as caught:
        parse_requirement(text, WORDS)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_met_checks_report_their_values():
    result = check(
        mixed(),
        Gate(limits=Limits(max_cpu_nodes=4, max_copies=3, max_copy_bytes_per_token=1544), max_unexplained=2),
        "r.json",
    )
    assert result.passed
    assert [(outcome.check, outcome.detail) for outcome in result.outcomes] == [
        ("--max-cpu-nodes 4", "4 nodes on CPUExecutionProvider in decode"),
        ("--max-copies 3", "3 Memcpy nodes in decode"),
        ("--max-copy-bytes-per-token 1544", "1,544 bytes in 4 copies per run of model.onnx (decode)"),
        ("--max-unexplained 2", f"{UNEXPLAINED} unexplained fallback in decode"),
    ]


UNEXPLAINED = sum(entry.reason == "unexplained" and entry.phase == "decode" for entry in mixed().fallbacks)


def test_max_unexplained_names_unexplained_nodes():
    assert UNEXPLAINED, "the sample has some"
    found = failures(Gate(max_unexplained=UNEXPLAINED - 1))
    assert "model.layers.0.self_attn/Det (Det)" in found[f"--max-unexplained {UNEXPLAINED - 1}"]


def cache(**changes):
    state = CacheState(name="past.0", layer=0, kind="key", memory="Cpu", size_bytes=64, in_place=True)
    given: dict[str, Any] = {
        "states": 1,
        "size_bytes": 64,
        "memories": {"Cpu": 64},
        "in_place_states": 1,
        "address_changes": 0,
        "checked_steps": 3,
        "entries": (state,),
    }
    return Cache(**(given | changes))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (cache(), None),
        (cache(in_place_states=0), "NOT in place"),
        (cache(address_changes=1), "its address changed"),
        (cache(checked_steps=0), "no step was observed"),
        (cache(states=0), "has no cache"),
        (None, "has no cache"),
    ],
)
def test_cache_in_place_must_be_observed(facts, words):
    report = mixed().model_copy(update={"cache": facts})
    found = failures(Gate(cache_in_place=True), report)
    assert found == {} if words is None else words in found["--require-cache-in-place"]


def test_min_tokens_per_second_checks_decode_speed():
    report = each_phase(mixed(), lambda phase: {"tokens_per_second": 5.0 if phase.name == "decode" else 1.0})
    assert failures(Gate(min_tokens_per_second=5), report) == {}
    assert failures(Gate(min_tokens_per_second=5.1), report) == {
        "--min-tokens-per-second 5.1": "5.00 tokens/s in decode, 1 step: too few for a reliable speed"
    }
    report = each_phase(report, lambda phase: {"tokens_per_second": None})
    assert "cannot be confirmed" in failures(Gate(min_tokens_per_second=0), report)["--min-tokens-per-second 0"]


def test_report_without_nodes_fails():
    empty = each_phase(mixed(), lambda phase: {"nodes": (), "copies": ()})
    for report in (empty, mixed().model_copy(update={"phases": ()})):
        assert (
            "nothing can be confirmed"
            in failures(Gate(limits=Limits(max_cpu_nodes=0, max_copies=0, max_copy_bytes_per_token=0)), report)[
                "report"
            ]
        )


def test_inconsistent_report_fails():
    report = mixed()
    first, *rest = report.checks
    broken = report.model_copy(update={"checks": (first.model_copy(update={"passed": False}), *rest)})
    assert first.name in failures(Gate(limits=Limits(max_cpu_nodes=99)), broken)["report"]


def test_node_moved_to_less_preferred_provider_is_regression():
    now = moved(QUERY, chain=MISSING_FIRST_CHAIN)
    found = failures(Gate(), now, mixed(MISSING_FIRST_CHAIN))
    assert found["--baseline: nodes"] == f"1 node: {QUERY} (prefill and decode: WebGpu -> CPU: unexplained)"
    assert found["--baseline: reasons"] == (
        f"1 node: {QUERY} (prefill and decode: why not WebGpu: new: unexplained, on CPU)"
    )
    assert failures(Gate(), now, now) == failures(Gate(), mixed(MISSING_FIRST_CHAIN), now) == {}


@pytest.mark.parametrize(
    ("was", "now", "left"),
    [
        ("ABC", "ABC", "AB AC BC"),
        ("ABC", "AC", "AB AC BC"),  # B is no longer in the chain
        ("AC", "ABC", "AB AC BC"),  # B is new, and better than C
        ("AB", "AC", "AB AC"),  # B and C have no order: both come second
    ],
)
def test_provider_preference_follows_both_chains(was, now, left):
    before, after = (
        mixed(tuple(ChainEntry(provider=name, status="active") for name in chain)).model_copy(update={"fallbacks": ()})
        for chain in (was, now)
    )
    lower = {f"{one}{other}" for one in "ABC" for other in "ABC" if is_less_preferred(before, after, one, other)}
    assert lower == set(left.split())
    assert is_less_preferred(before, after, "C", None) and not is_less_preferred(before, after, None, "C")


def test_only_new_fallback_nodes_are_a_regression():
    report = mixed()
    first, *rest = report.fallbacks
    other = report.model_copy(update={"fallbacks": (first.model_copy(update={"reason": "not_claimed"}), *rest)})
    assert failures(Gate(), other, report) == {}
    fewer = report.model_copy(update={"fallbacks": tuple(rest)})
    assert first.node in failures(Gate(), report, fewer)["--baseline: reasons"]


def test_more_copies_and_bytes_are_a_regression():
    def fewer(phase):
        cost = with_cost(phase, copies=3, copy_bytes_at_least=100)
        return {"copies": phase.copies[:-2], "cost": cost}

    found = failures(Gate(), mixed(), each_phase(mixed(), fewer))
    assert found["--baseline: copies"].startswith("copies (prefill and decode: 2 -> 4); new: ")
    assert "bytes copied per token (decode: 100 B -> 1.51 KiB)" in found["--baseline: bytes copied"]
    assert failures(Gate(), each_phase(mixed(), fewer), mixed()) == {}


def test_possible_cpu_nodes_count_in_every_phase():
    """The phase with most known CPU nodes may differ from the phase with most possible ones."""

    def unknown(phase):
        if phase.name == "prefill":
            return {}
        return {"nodes": tuple(node.model_copy(update={"provider": None}) for node in phase.nodes)}

    report = each_phase(mixed(), unknown)
    (known,) = {len([n for n in p.nodes if n.provider == CPU]) for p in report.phases if p.name == "prefill"}
    found = failures(Gate(limits=Limits(max_cpu_nodes=known)), report)
    assert "cannot be confirmed in decode: no source names" in found[f"--max-cpu-nodes {known}"]


def test_cache_no_longer_in_place_is_a_regression():
    was, now = (mixed().model_copy(update={"cache": facts}) for facts in (cache(), cache(in_place_states=0)))
    assert "-> NOT in place" in failures(Gate(), now, was)["--baseline: cache"]
    assert failures(Gate(), now, now) == {}, "it was no better before"
    unseen = mixed().model_copy(update={"cache": cache(checked_steps=0)})
    assert "--baseline: cache" in failures(Gate(), unseen, was) and failures(Gate(), was, unseen) == {}


def test_copied_bytes_are_compared_per_token():
    """Runs with different token counts are compared by bytes per token."""

    def run(tokens, each):
        cost = {"tokens_per_run": tokens, "copy_bytes_at_least": tokens * each}
        return each_phase(mixed(), lambda phase: {"cost": with_cost(phase, **cost)})

    assert failures(Gate(), run(8, 100), run(2, 100)) == failures(Gate(), run(2, 100), run(8, 100)) == {}
    for larger in (run(8, 101), run(2, 101)):
        found = failures(Gate(), larger, run(4, 100))["--baseline: bytes copied"]
        assert found == "bytes copied per token (prefill and decode: 100 B -> 101 B)"


def test_inconsistent_baseline_fails():
    report = mixed()
    first, *rest = report.checks
    broken = report.model_copy(update={"checks": (first.model_copy(update={"passed": False}), *rest)})
    assert f"the baseline is inconsistent: {first.name}" in failures(Gate(), report, broken)["report"]


def test_missing_phase_is_a_regression():
    found = failures(Gate(), mixed().model_copy(update={"phases": mixed().phases[:1]}), mixed())
    assert found == {"--baseline: phases": "phases (request: prefill, decode -> prefill)"}


def test_time_is_compared_only_with_max_slowdown():
    fast = each_phase(mixed(), lambda phase: {"tokens_per_second": 100.0})
    slow = each_phase(mixed(), lambda phase: {"tokens_per_second": 80.0})
    assert failures(Gate(), slow, fast) == {}
    assert failures(Gate(max_slowdown=0.25), slow, fast) == {}
    found = failures(Gate(max_slowdown=0.2), slow, fast)
    assert found["--max-slowdown 0.2"] == "80.0 tokens/s, 100 in the baseline: 1.25 times the time per token"


def test_time_on_different_processor_or_phase_is_unconfirmed():
    was, gate = mixed(), Gate(max_slowdown=0.5)
    other = was.model_copy(update={"environment": was.environment.model_copy(update={"cpu": "Another CPU"})})
    assert failures(gate, mixed(), other) == {
        "--max-slowdown 0.5": "cannot be confirmed: the runs were on different processors"
    }
    short = was.model_copy(update={"phases": was.phases[:1]})
    said = failures(gate, mixed(), short)["--max-slowdown 0.5"]
    assert said == "cannot be confirmed: decode here, prefill in the baseline"


def test_profiled_and_unprofiled_speeds_are_not_compared():
    free, slow = (each_phase(mixed(), lambda _: {"profiled": False}), each_phase(mixed(), lambda _: {"profiled": True}))
    gate = Gate(max_slowdown=0.5)
    for now, was, where in ((free, slow, "in the baseline"), (slow, free, "here")):
        said = failures(gate, now, was)["--max-slowdown 0.5"]
        assert f"cannot be confirmed: every step of decode was profiled {where}" in said
    older = each_phase(mixed(), lambda phase: {"profiled": None})
    for one in (free, slow, older):
        assert failures(gate, one, one) == failures(gate, one, older) == {}


def test_speeds_with_different_active_rows_are_not_compared():
    def rows(count, **changes):
        report = each_phase(mixed(), lambda _: {"steps": 40, "tokens": round(40 * count)})
        return report.model_copy(update=changes)

    gate = Gate(max_slowdown=0.5)
    for now, was, said in (
        (rows(1), rows(7.5), "1.00 active rows .* 7.50"),
        (rows(7.5), rows(1), "7.50 active rows .* 1.00"),
    ):
        found = failures(gate, now, was)["--max-slowdown 0.5"]
        assert re.fullmatch(f"cannot be confirmed: {said} in the baseline", found), found
    assert failures(gate, rows(7.5), rows(7.2)) == {}
    guessed = rows(2.4, speculation=speculation_figures(NGRAM, STEPS))
    assert failures(gate, guessed, rows(1)) == {}, "several tokens of one row"
    assert "7.50 in the baseline" in failures(gate, guessed, rows(7.5))["--max-slowdown 0.5"]


def test_baseline_with_other_preferred_provider_fails():
    baseline = mixed().model_copy(update={"chain": tuple(reversed(GPU_CHAIN))})
    assert f"{CPU} -> {GPU}" in failures(Gate(), mixed(), baseline)["--baseline: preferred provider"]


def test_baseline_of_another_model_raises_report_error():
    other = report_of(recorded_facts(), package=PACKAGE.model_copy(update={"manifest_sha256": "cd" * 32}))
    with pytest.raises(
        ReportError, match=r"a\.json cannot be a baseline for r\.json: only .*; give a report of the same model"
    ):
        failures(Gate(), mixed(), other)


@pytest.mark.parametrize("field", FIELDS)
def test_every_requirement_field_is_documented(field):
    page = (REPOSITORY / "docs" / "reports.md").read_text(encoding="utf-8")
    table = page.partition("### Conditions")[2].partition("```")[0]
    assert f"`{field}`" in table
    told = next(each.option.help for each in describe_fields(CheckCommand) if each.name == "require")
    assert re.search(rf"\b{field}\b", told)


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        (
            MISSING_FIRST_CHAIN,
            "1 provider could not start: TensorrtExecutionProvider (library_missing: libnvinfer.so.10",
        ),
        (NO_GPU_CHAIN, ""),
        (GPU_CHAIN, ""),
    ],
    ids=["could not start", "not in this build", "there"],
)
def test_unavailable_counts_providers_failing_to_start(chain, told):
    holds, said = required("unavailable=0", report_of(recorded_facts(), chain))
    assert holds is not bool(told) and said.startswith(told)


GATES = {
    "--require": Gate(requirements=(parse_requirement("provider=cpu,share>=0", WORDS),)),
    "--max-cpu-nodes": Gate(limits=Limits(max_cpu_nodes=999)),
    "--max-copies": Gate(limits=Limits(max_copies=999)),
    "--max-copy-bytes-per-token": Gate(limits=Limits(max_copy_bytes_per_token=10**9)),
    "--max-unexplained": Gate(max_unexplained=999),
    "--require-cache-in-place": Gate(cache_in_place=True),
    "--min-tokens-per-second": Gate(min_tokens_per_second=0),
    "--max-slowdown": Gate(max_slowdown=99),
}


@pytest.mark.parametrize("option", GATES)
@pytest.mark.parametrize("how", ["a run of place", "a generation"])
def test_every_gate_fails_on_failed_run(option, how):
    facts, gate = recorded_facts(), GATES[option]
    good = report_of(facts)
    baseline = ("a.json", good) if option == "--max-slowdown" else None
    assert check(good, gate, "r.json", baseline).passed
    changes: dict[str, Any] = (
        {"failure": "no kernel"} if how == "a run of place" else {"finish_reason": "error", "finish_detail": "boom"}
    )
    bad = report_of(replace(facts, **changes))
    found = check(bad, gate, "r.json", baseline)
    assert not found.passed and not any(outcome.met for outcome in found.outcomes)
    assert found.outcomes[0].detail.endswith("boom" if how == "a generation" else "no kernel")
    assert exceeded_limits(bad, gate.limits) or gate.limits == Limits()


def test_failed_baseline_fails_and_interrupted_run_passes():
    facts = recorded_facts()
    good, bad = report_of(facts), report_of(replace(facts, failure="no kernel"))
    assert "the run of the baseline failed" in failures(Gate(), good, bad)["report"]
    assert "the run of the report failed" in failures(Gate(), bad, good)["report"]
    assert failures(GATES["--max-copies"], report_of(replace(facts, finish_reason="interrupted"))) == {}
