"""`report explain`: all facts about a node, found by its name or part of it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from partita.diagnosis.records import FallbackCost, VariantRecord
from partita.explain import Explanation, Matches, find, headline, render_no_single
from partita.observations import facts
from partita.observations.records import Probing
from partita.partition_reports.phase_records import SubgraphNode, Subgraphs
from partita.partition_reports.records import SourceConflict
from tests.partition_reports.report_changes import HARMFUL, HOSTILE, compiled, each_phase, mixed, renamed
from tests.partition_reports.samples import CPU, GPU_CHAIN, MISSING_FIRST_CHAIN, mixed_session, report_of, run_facts
from tests.views import print_text

GATHER, DET = "model.rotary_emb/Gather", "model.layers.0.self_attn/Det"
SIGMOID, MUL = "model.rotary_emb/Expand", "model.layers.0.mlp/Mul"


def explained(report, query) -> Explanation:
    found = find(report, query)
    assert isinstance(found, Explanation), found
    return found


def rendered(found, width=80):
    stream = io.StringIO()
    print_text(found, "partita.explain", Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


def probed(trials, **changes):
    """The report with these experiments on the Gather."""
    report = mixed()
    update = {"variants": trials, **changes}
    fallbacks = (entry.model_copy(update=update) if entry.node == GATHER else entry for entry in report.fallbacks)
    return report.model_copy(update={"fallbacks": tuple(fallbacks)})


def words(found, width=80):
    return " ".join(rendered(found, width).split())


@pytest.mark.parametrize(
    ("query", "line"),
    [
        (GATHER, f"{GATHER}: Gather on CPU, not on WebGpu: no_kernel_op (logged) in prefill and decode"),
        ("LM_HEAD", "lm_head/MatMul: MatMul on WebGpu, the preferred provider, in prefill and decode"),
        ("input", "input_ids: session input, copied host to device in prefill and decode"),
        ("Memcpy", "Memcpy: copies query device to host in prefill and decode"),
        ("", "the node name is empty; give a name or a part of it"),
        ("no such thing at all", "no node matches 'no such thing at all' (fused nodes included); it does not exist"),
    ],
)
def test_first_line_names_provider_and_reason(query, line):
    """An exact name wins over names that begin with it; the case is ignored."""
    assert rendered(find(mixed(), query), 200).splitlines()[0].startswith(line)


def test_explanation_lists_all_facts_per_phase():
    found = explained(mixed(), GATHER)
    assert [(place.phase, place.position, place.provider) for place in found.places] == [
        ("prefill", 2, CPU),
        ("decode", 2, CPU),
    ]
    assert [place.host_us_per_run for place in found.places] == [100.0, 100.0]
    out = words(found)
    for part in (
        "source line modeling_llama.py:88",
        "module model.rotary_emb",
        "prefill CPU 2 0.100",
        "evidence (logged) [I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability]",
        f"remedy {found.fallbacks[0].remedy[:40]}",
    ):
        assert part in out, part


def test_replaced_node_is_explained_by_its_fused_node():
    found = explained(compiled(4, SIGMOID, MUL)(mixed()), SIGMOID)
    assert {(place.kind, place.node) for place in found.places} == {("replaced", "EP_subgraph_4_0")}
    out = words(found, 120)
    assert "not in the plan; fused into EP_subgraph_4_0: CompiledSubgraph on WebGpu" in out
    assert f"EP_subgraph_4_0 is fused from 2 nodes of the file: {SIGMOID}, {MUL}" in out
    whole = words(explained(compiled(4, SIGMOID, MUL)(mixed()), "EP_subgraph_4_0"), 120)
    assert f"fused from 2 nodes of the file: {SIGMOID}, {MUL}" in whole


def test_copies_are_shown_at_their_node_and_their_cause():
    found = words(explained(mixed(), "Memcpy"), 200)
    assert "Copy in decode" in found and f"Memcpy query device_to_host 512 B 0.100 {DET}" in found
    cause = explained(mixed(), DET)
    assert {copy.name for place in cause.places for copy in place.copies_caused} == {"Memcpy", "Memcpy_token_1"}
    assert "Copies caused by the node in decode" in words(cause)


def test_control_flow_subgraph_node_is_explained():
    inside = SubgraphNode(name="loop/Cos", op_type="Cos")
    report = each_phase(mixed(), lambda phase: {"subgraphs": Subgraphs(nodes=2, on_cpu=(inside,), copies=0)})
    assert words(explained(report, "loop/Cos")).startswith("loop/Cos: Cos on CPU in a control-flow subgraph in prefill")


def test_probes_are_listed_and_repeated_messages_quoted_once():
    said = "code 17, says the driver"
    trials = (
        VariantRecord(factor="as_is", change="", outcome="rejected", message=said, cached=True),
        VariantRecord(
            factor="type", change="float16 in place of float32", outcome="supported", message="", cached=False
        ),
        VariantRecord(factor="opset", change="Gather of opset 11", outcome="timed_out", message=said, cached=False),
    )
    out = rendered(explained(probed(trials, missing_probes="the time was up"), GATHER))
    flat = " ".join(out.split())
    assert "3 probes of this node on WebGpuExecutionProvider (2 in this run, 1 from the cache)" in flat
    assert (
        "unchanged rejected [1]" in flat and "float16 in place of float32 supported" in flat and "timed out [1]" in flat
    )
    assert out.count(said) == 1 and "missing probes: the time was up" in out


def test_cost_conflicts_and_missing_probes_are_shown():
    report = mixed()
    cost = FallbackCost(
        copies=("Memcpy",),
        copy_bytes_per_run=2048,
        copy_wait_us_per_run=1500.0,
        host_us_per_run=9.0,
        time_share=0.5,
        harmless=False,
        harmless_reason="it causes 1 copy",
    )
    update = {
        "fallbacks": tuple(entry.model_copy(update={"cost": cost}) for entry in report.fallbacks),
        "conflicts": (SourceConflict(phase="decode", node=GATHER, detail="cpu or gpu", sources=("profile",)),),
        "probing": Probing(seconds=1, budget_seconds=5, experiments=1, cached=0, crashes=0, missing_probes=(GATHER,)),
    }
    out = words(explained(report.model_copy(update=update), GATHER))
    assert "cost in decode copies Memcpy; copy bytes 2 KiB; copy wait ms 1.50; host ms 0.009; time share 50.0 %" in out
    assert "harmless no; harmless reason it causes 1 copy" in out
    assert "conflicting sources in decode: cpu or gpu (profile)" in out
    assert "probes are missing; the time budget was 5 seconds" in out


def test_partial_name_lists_matches_with_provider_and_reason():
    found = find(mixed(), "rotary_emb/")
    assert isinstance(found, Matches) and len(found.matches) == 4
    assert found.matches[1] == GATHER and "Gather on CPU, not on WebGpu: no_kernel_op" in found.headlines[1]
    assert all(name in rendered(found) for name in found.matches)
    assert render_no_single(found).startswith("'rotary_emb/' matches 4 nodes")


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        ("lm_head/MatMull", "lm_head/MatMul"),
        ("model.layers.0.self_attn/Dett", DET),
        ("Gahter", "model.embed_tokens/Gather"),
    ],
)
def test_similar_names_are_suggested(query, meant):
    found = find(mixed(), query)
    assert isinstance(found, Matches)
    said = render_no_single(found)
    assert meant in said.partition("did you mean ")[2] and "\n" not in said


def test_name_with_control_characters_is_escaped_and_found():
    report = renamed(mixed(), {GATHER: HOSTILE})
    shown = rendered(explained(report, HOSTILE), 200).partition(":")[0]
    assert not HARMFUL & set(rendered(explained(report, HOSTILE)))
    again = explained(report, shown)
    assert again.node == HOSTILE
    assert json.loads(json.dumps(again.model_dump(mode="json", by_alias=True)))["node"] == HOSTILE


def test_missing_provider_does_not_hide_reason_of_available_provider():
    """The reason of the available provider comes first, as in every other view."""
    report = mixed(MISSING_FIRST_CHAIN)
    assert "not on WebGpu: no_kernel_op" in rendered(explained(report, GATHER), 200).splitlines()[0]
    found = find(report, "rotary_emb/")
    assert isinstance(found, Matches)
    assert "no_kernel_op" in found.headlines[found.matches.index(GATHER)]


def test_explanation_of_failed_run_shows_the_failure():
    report = mixed().model_copy(update={"failure": "no kernel"})
    assert headline(explained(report, MUL)).endswith("; the run FAILED")
    assert "FAILED" not in headline(explained(mixed(), MUL))
    assert "no kernel; the node may not have run" in words(explained(report, MUL))


def test_explanation_lists_overridden_reasons_with_precedence():
    """The log reports a missing kernel, a probe an unsupported type; the probe has precedence."""
    trials = (
        facts.ProbeRun("as_is", "", "rejected", ""),
        facts.ProbeRun("type", "int32 in place of int64", "supported", ""),
    )
    found = explained(
        report_of(run_facts(mixed_session(probes={GATHER: facts.NodeProbe(GATHER, trials)})), GPU_CHAIN), GATHER
    )
    (entry, _) = found.fallbacks
    assert (entry.reason, [each.reason for each in entry.other_reasons]) == ("no_kernel_type", ["no_kernel_op"])
    assert "Op type: Gather" in entry.other_reasons[0].evidence
    out = words(found, 400)
    assert "no_kernel_op: lower precedence" in out and "a log line names the node; no_kernel_type: rank " in out
    assert "an experiment on the node in isolation" in out
    assert "lost" not in words(found.without_lost(), 400)


def test_probe_contradicting_the_log_is_a_source_conflict():
    taken = facts.NodeProbe(GATHER, (facts.ProbeRun("as_is", "", "supported", ""),))
    session = mixed_session(probes={GATHER: taken})
    (conflict, _) = report_of(run_facts(session)).conflicts
    assert conflict.node == GATHER and conflict.sources == ("native_log", "probe")
    unfolded = facts.NodeProbe(GATHER, (facts.ProbeRun("as_is", "", "supported", "", function_inlined=True),))
    assert not report_of(run_facts(mixed_session(probes={GATHER: unfolded}))).conflicts
