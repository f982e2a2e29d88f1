"""Probing after a run: order of nodes, rejected graphs, and unchanged run facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.errors import ProviderError
from partita.library.place.probing import refusals_explained, with_probes
from partita.observations.facts import AssignedNode, NodeProbe, Outcome, RejectedPart
from partita.providers.resolve import Resolution, known_providers
from partita.remedies import Remedy
from partita.runtime.chain.open_chain import ChainError
from partita.runtime.lab import probes as engine
from partita.runtime.lab.bisection import Search, find_rejected
from partita.runtime.lab.graph import Graph
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.placement import AUXILIARY, Placement
from partita.runtime.lab.probes import probe_refusal, probe_run
from partita.runtime.place.onnx_model import OnnxModel, read_onnx
from tests.partition_reports.samples import run_facts, session_facts
from tests.runtime.lab.conftest import HEAD
from tests.runtime.lab.conftest import ScriptedLab as NamedLab

CPU, QNN, WEBGPU = (known_providers()[name].ort_name for name in ("cpu", "qnn", "webgpu"))
PREFERRED = Resolution(known_providers()["qnn"], "active")
FALLBACK = Resolution(known_providers()["cpu"], "active")
MISSING = replace(PREFERRED, status="unavailable", evidence="no such device", remedy=Remedy("buy one"))
GONE = replace(MISSING, reason="device_missing")
FAILED = replace(MISSING, reason="initialisation_failed", evidence="finalising failed", remedy=Remedy("?"))
TEXT = HEAD.format(opset=21) + (
    "g (float[N,4] x) => (float[N,4] y) {\n  [a] h = Relu(x)\n  [b] i = Elu<alpha=2.0>(h)\n"
    "  [c] j = Elu<alpha=2.0>(i)\n"
    "  [d] k = Relu(j)\n  [e] y = Softplus(k)\n}"
)
SIZES = {"x": (2, 4)}


class ScriptedLab(Lab):
    """Answers by the operators in a model, without a process: fails on a Softplus, rejects an Elu with alpha."""

    starts_at_all = True
    tried: list[str] = []

    def starts(self) -> bool:
        return self.starts_at_all

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[Placement | None]:
        return [self.answer(model) for model in models]

    def answer(self, model: onnx.ModelProto) -> Placement:
        self.experiments += 1
        operators = [node.op_type for node in model.graph.node]
        self.tried.append("+".join(operators))  # with a Neg for a compiling provider
        if "Softplus" in operators:
            return Placement("failed", "finalising the graph failed")
        left = [node for node in model.graph.node if node.op_type == "Elu" and node.attribute]
        return Placement("rejected", "no such kernel") if left else Placement("supported")


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    onnx.save(parser.parse_model(TEXT), tmp_path / "m.onnx")
    return read_onnx(tmp_path / "m.onnx")


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLab]:
    monkeypatch.setattr(engine, "Lab", ScriptedLab)
    monkeypatch.setattr(engine, "cache_for", lambda _: Cache(None))
    monkeypatch.setattr(ScriptedLab, "tried", [])
    return ScriptedLab


def facts_of(model: OnnxModel, on_cpu: str):
    """A session in which every node but these is on the preferred provider."""
    assigned = tuple(
        AssignedNode(node.name, node.op_type, "", CPU if node.name in on_cpu else QNN, number)
        for number, node in enumerate(model.nodes)
    )
    session = session_facts(file="m.onnx", phases=("run",), graph=model.nodes, registered=(QNN, CPU))
    plan = (tuple(node.name for node in model.nodes),)
    return run_facts(replace(session, plan=plan, assigned=assigned))


def probed(facts, chain=(PREFERRED, FALLBACK), seconds=60.0, model=None):
    return probe_run(facts, chain, {"m.onnx": model} if model else {}, {"m.onnx": SIZES}, seconds)


def test_each_skipped_provider_is_probed(model, scripted):
    """With `qnn,webgpu,cpu`, a node on CPU is probed on both, a node on WebGPU on QNN only."""
    before = facts_of(model, "b")
    second = Resolution(known_providers()["webgpu"], "active")
    (session,) = before.sessions
    assigned = tuple(replace(node, provider=WEBGPU) if node.name == "c" else node for node in session.assigned)
    facts, _ = probed(
        replace(before, sessions=(replace(session, assigned=assigned),)), (PREFERRED, second, FALLBACK), model=model
    )
    (session,) = facts.sessions
    assert set(session.of(QNN).probes) == {"b", "c"} and set(session.of(WEBGPU).probes) == {"b"}
    assert facts.probing.experiments == len(scripted.tried)


@pytest.mark.parametrize("case", ["no time", "the cpu is wanted", "nothing fell back", "the device is missing"])
def test_no_probes_without_time_fallback_or_missing_provider(model, scripted, case):
    facts = facts_of(model, "" if case == "nothing fell back" else "b")
    chain = {"the cpu is wanted": (FALLBACK,), "the device is missing": (GONE, FALLBACK)}.get(
        case, (PREFERRED, FALLBACK)
    )
    seconds = 0.0 if case == "no time" else 60.0
    assert probed(facts, chain, seconds, model) == (facts, chain) and scripted.tried == []


def test_unprobed_node_records_reason(model):
    facts = facts_of(model, "b")
    broken = replace(model, proto=parser.parse_model(TEXT.replace("h = Relu(x)", "h = own.Mystery(x)")))
    after, _ = probed(facts, model=broken)
    assert after.sessions[0].of(QNN).probes["b"] == NodeProbe("b", (), "the type of its input 'h' is unknown")
    assert after.probing is not None and after.probing.experiments == 0 and after.probing.missing_probes == ("b",)
    assert any("the type of its input 'h' is unknown: b" in note for note in after.notes)


def test_interrupted_probing_saves_completed_outcomes(model, scripted, monkeypatch, tmp_path):
    def interrupted(self, models, *, one_node=True):
        self.cache["node:a"] = Placement("supported", "")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "cache_for", lambda _: Cache(tmp_path / "answers.json"))
    monkeypatch.setattr(scripted, "try_all", interrupted)
    facts = facts_of(model, "b")
    after, chain = with_probes(facts, (PREFERRED, FALLBACK), {"m.onnx": model}, {"m.onnx": SIZES}, 60.0)
    assert Cache(tmp_path / "answers.json").get("node:a") == Placement("supported", "", cached=True)
    assert chain == (PREFERRED, FALLBACK) and after.sessions == facts.sessions
    assert after.interruptions == ("experiments",) and "were interrupted" in after.notes[-1]


def test_full_disk_skips_probing_and_preserves_report(model, scripted, monkeypatch):
    def full(self, models, *, one_node=True):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scripted, "try_all", full)
    after, _ = with_probes(facts_of(model, "b"), (PREFERRED, FALLBACK), {"m.onnx": model}, {"m.onnx": SIZES}, 60.0)
    assert after.probing is None and "No space left on device" in after.notes[-1]
    error = ChainError("m.onnx: not all on qnn", path=model.path, chain=(FAILED,))
    with pytest.raises(ChainError) as caught, refusals_explained(60.0, model=model, sizes=SIZES):
        raise error
    assert caught.value is error


def test_rejected_graph_is_bisected_and_rejected_node_is_probed(model):
    facts, chain = probed(facts_of(model, "abcde"), (FAILED, FALLBACK), model=model)
    found = facts.sessions[0].of(QNN)
    assert found.rejected is not None and found.rejected.nodes == ("e",) and found.rejected.minimal
    assert found.rejected.message == "finalising the graph failed" and found.probes["e"].variants[0].outcome == "failed"
    assert (chain[0].status, chain[0].reason) == ("unavailable", "subgraph_rejected") and chain[1] == FALLBACK


def test_remedy_removes_option_causing_graph_rejection(model, scripted, monkeypatch):
    asked: list[tuple[str, str, int, bool]] = []

    def try_with(lab, option, value, models, *, one_node=True):
        asked.extend((option, value, len(each.graph.node), one_node) for each in models)
        return [Placement("supported", "") for _ in models]

    monkeypatch.setattr(scripted, "try_with", try_with)
    switched = replace(FAILED, options={"htp_bf16_enable": "1", "soc_model": "43"})
    _, chain = probed(facts_of(model, "abcde"), (switched, FALLBACK), model=model)
    assert chain[0].reason == "subgraph_rejected" and chain[0].remedy is not None
    assert chain[0].remedy.text == "remove qnn.htp_bf16_enable=1; without it the provider opens this graph"
    assert chain[0].remedy.alternative is not None, "or change the graph"
    assert asked == [("htp_bf16_enable", "0", 5, False)]


def test_provider_start_failure_reason_is_unchanged_by_probing(model, scripted, monkeypatch):
    monkeypatch.setattr(scripted, "starts_at_all", False)
    facts, chain = probed(facts_of(model, "abcde"), (FAILED, FALLBACK), model=model)
    assert facts.sessions[0].of(QNN).rejected is None and chain == (FAILED, FALLBACK)


def test_chain_error_includes_causes_of_all_providers_and_rejected_subgraph(model):
    missing = replace(GONE, provider=known_providers()["tensorrt"])
    error = ChainError("m.onnx: none starts", path=model.path, chain=(missing, FAILED))
    told = probe_refusal(error, model, SIZES, 60.0)
    assert isinstance(told, ProviderError) and told.exit_code == 3 and "\n" not in str(told)
    assert "tensorrt: device_missing: no such device; " in str(told) and "; buy one" in str(told)
    assert "qnn: subgraph_rejected: " in str(told)
    assert "the smallest part that fails with only an added Neg is e" in str(told)


# Bisection: the smallest subgraph that a provider rejects, if its error names no node


NODES = 16


def lab_of(rejects: Callable[[Collection[str]], bool], tries: int = 10_000, outcome: Outcome = "failed") -> NamedLab:
    """A laboratory that rejects parts of these names. `tries`: number of answers before its time ends."""

    def answer(model: onnx.ModelProto) -> Placement | None:
        names = [node.name for node in model.graph.node if node.name != AUXILIARY]
        if len(lab.models) > tries:
            return None
        return Placement(outcome, f"{len(names)} nodes are too many") if rejects(names) else Placement("supported")

    lab = NamedLab(answer, Resolution(known_providers()["qnn"], "active"))
    return lab


def rejected(graph: Graph, lab: NamedLab) -> RejectedPart:
    found = find_rejected(Search(graph, lab))
    assert found is not None
    return found


@pytest.fixture
def chain(cut) -> Graph:
    """Sixteen nodes in a row, n0 to n15; the second half also reads the output of the first node."""
    lines = [f"  [n{step}] t{step + 1} = Add(t{step}, {'t1' if step > 7 else 't0'})" for step in range(NODES)]
    return cut(f"g (float[4] t0) => (float[4] t{NODES}) {{\n" + "\n".join(lines) + "\n}")


@pytest.mark.parametrize("culprits", [("n0",), ("n7",), ("n15",), ("n0", "n15"), ("n2", "n9"), ("n14", "n15")])
@pytest.mark.parametrize("outcome", ["failed", "crashed", "timed_out"])
def test_bisection_finds_nodes_that_fail_alone_or_together(chain, culprits, outcome):
    lab = lab_of(lambda names: set(culprits) <= set(names), outcome=outcome)
    found = rejected(chain, lab)
    assert found.nodes == culprits and found.minimal
    assert found.message == f"{len(culprits)} nodes are too many", "the message of this part, not of the whole"
    assert found.neg_added == (len(culprits) == 1), "QNN compiles"
    assert found.attempts + 1 == len(lab.models), "and once without it"
    assert len(culprits) > 1 or len(lab.models) < 2 * NODES, "in halves, not one by one"


@pytest.mark.parametrize("tries", range(1, 6))
def test_exhausted_budget_returns_smallest_subgraph_so_far(chain, tries):
    pair = {"n2", "n9"}
    found = rejected(chain, lab_of(lambda names: pair <= set(names), tries))
    assert pair <= set(found.nodes) and not found.minimal
    assert found.attempts == tries and found.message == f"{len(found.nodes)} nodes are too many"


def test_bisection_finds_every_rejected_part_and_tests_the_rest(chain):
    lab = lab_of(lambda names: "n3" in names or {"n9", "n12"} <= set(names))
    found = rejected(chain, lab)
    assert [part.nodes for part in found.parts] == [("n3",), ("n9", "n12")]
    assert found.rest_opens and sum(part.attempts for part in found.parts) <= len(lab.models)
