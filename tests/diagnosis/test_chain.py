"""Every skipped provider of the chain has its own reason and evidence, in every view."""

from __future__ import annotations

from partita.check.gate import find
from partita.check.requirements import parse_requirement
from partita.compare.reports import compare
from partita.diagnosis.explanation import find_fallbacks
from partita.diagnosis.session_index import SessionIndex
from partita.explain import explain
from partita.observations.facts import AssignedNode, NodeProbe, ProbeRun, SessionFacts
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import load_view
from tests.partition_reports.samples import CPU, exported, report_of, run_facts, session_facts

TENSORRT, CUDA = "TensorrtExecutionProvider", "CUDAExecutionProvider"
ON_TENSORRT, ON_CUDA, ON_CPU = "a/MatMul", "b/Add", "c/Det"
CHAIN = tuple(ChainEntry(provider=name, status="active") for name in (TENSORRT, CUDA, CPU))
NOT_IN_CUDA = f"CUDA kernel not found in registries for Op type: Det node name: {ON_CPU}"
NO_GRAPH = "[TensorRT EP] some of it will not run"


def three_providers(log: tuple[str, ...] = (NOT_IN_CUDA, NO_GRAPH)) -> SessionFacts:
    names = (ON_TENSORRT, ON_CUDA, ON_CPU)
    session = session_facts(
        of=CUDA,
        patterns=(
            LogPattern("no_kernel_op", r"CUDA kernel not found .*Op type: (?P<op>\S+) node name: (?P<node>\S+)"),
        ),
        graph=tuple(exported(name, (), ()) for name in names),
        plan=(names,),
        assigned=tuple(
            AssignedNode(name, name.partition("/")[2], "", provider, number)
            for number, (name, provider) in enumerate(zip(names, (TENSORRT, CUDA, CPU), strict=True))
        ),
        registered=(TENSORRT, CUDA, CPU),
        log=log,
    )
    return session.with_provider(TENSORRT, patterns=(LogPattern("subgraph_rejected", r"(?P<why>\[TensorRT EP\] .*)"),))


def test_node_on_last_provider_has_reason_per_skipped_provider() -> None:
    on_cuda, on_cpu = find_fallbacks(SessionIndex(three_providers()), "decode", CHAIN)
    found = (on_cpu.node, on_cpu.preferred_provider, on_cpu.reason, on_cpu.evidence)
    assert found == (ON_CPU, TENSORRT, "subgraph_rejected", NO_GRAPH)
    (skipped,) = on_cpu.skipped
    assert (skipped.provider, skipped.reason, skipped.evidence) == (CUDA, "no_kernel_op", NOT_IN_CUDA)
    assert skipped.remedy
    assert (on_cuda.node, on_cuda.provider, on_cuda.skipped) == (ON_CUDA, CUDA, ())

    (_, only_cuda) = find_fallbacks(SessionIndex(three_providers(log=(NOT_IN_CUDA,))), "decode", CHAIN)
    assert (only_cuda.reason, only_cuda.skipped[0].reason) == ("unexplained", "no_kernel_op")


def report(log: tuple[str, ...] = (NOT_IN_CUDA, NO_GRAPH)) -> Report:
    return report_of(run_facts(three_providers(log=log)), CHAIN)


def test_text_report_and_explanation_show_both_reasons() -> None:
    shown = (
        load_view("text").to_text(report()),
        load_view("text", "partita.explain").to_text(explain(report(), ON_CPU)),
    )
    for text in (" ".join(each.split()) for each in shown):
        assert "ot on CUDA" in text.replace("ExecutionProvider", "") and "no_kernel_op" in text, text
        assert "subgraph_rejected" in text


def test_changed_reason_of_second_provider_is_a_difference() -> None:
    diff = compare(report(log=(NOT_IN_CUDA,)), report(log=()))
    (change,) = [change for change in diff.of("reasons") if change.group == "decode"]
    reasons = ("unexplained, no_kernel_op", "unexplained, unexplained")
    assert (change.name, change.before, change.after) == (ON_CPU, *reasons)
    assert not diff.same


def test_reason_requirement_counts_every_skipped_provider() -> None:
    told = report()
    for reason, nodes in (("no_kernel_op", 1), ("unexplained", 0)):
        requirement = parse_requirement(f"reason={reason},nodes={nodes}", str)
        assert find(requirement, told)[0], reason


def test_probes_apply_only_to_their_provider() -> None:
    trials = (ProbeRun("as_is", "", "rejected", ""), ProbeRun("type", "float16 in place of float32", "supported", ""))
    session = three_providers(log=()).with_provider(CUDA, probes={ON_CPU: NodeProbe(ON_CPU, trials)})
    on_cpu = find_fallbacks(SessionIndex(session), "decode", CHAIN)[-1]
    assert (on_cpu.reason, on_cpu.variants) == ("unexplained", ())
    assert (on_cpu.skipped[0].reason, len(on_cpu.skipped[0].variants)) == ("no_kernel_type", 2)
