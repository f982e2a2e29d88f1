"""Probes beyond the node alone: provider options, and the neighbours of a node that is supported alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita import dtypes
from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons import reason_from_probes
from partita.observations.facts import OPTION
from partita.providers.base import Option, ProbeValue
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import Subject, explore, explore_surroundings
from partita.runtime.lab.graph import Graph, cut_graph
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.neighbours import MOST_TOGETHER, neighbourhoods
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.variant import NODE, node_variant
from partita.runtime.place.onnx_model import read_onnx

WEBGPU = replace(
    known_providers()["webgpu"], options=(Option("wide", "bool", "0", "", probe_value=ProbeValue("1", ("int64",))),)
)
CHAIN = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (int64[2,4] x) => (float[2,4] y) {\n  [a] h = Neg(x)\n  [b] i = Cast<to=1>(h)\n  [c] j = Relu(i)\n"
    "  [d] k = Elu(j)\n  [e] y = Softplus(k)\n}"
)


class Scripted(Lab):
    """Leaves int64 unless the option is set, and a Relu that has a Softplus somewhere in its company."""

    def __init__(self, **options: str) -> None:
        super().__init__(Resolution(WEBGPU, "active", options=options), Cache(None), time.monotonic() + 60)
        self.asked: list[tuple[str, str]] = []

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[Placement | None]:
        return [self.answer(model) for model in models]

    def try_with(
        self, option: str, value: str, models: Sequence[onnx.ModelProto], *, one_node: bool = True
    ) -> list[Placement | None]:
        self.asked.append((option, value))
        return [Placement("supported", "") for _ in models]

    def answer(self, model: onnx.ModelProto) -> Placement:
        node = next(node for node in model.graph.node if node.name == NODE)
        kinds = {port.type.tensor_type.elem_type for port in (*model.graph.input, *model.graph.output)}
        others = {each.op_type for each in model.graph.node}
        kinds |= {each.i for each in node.attribute if each.name == "to"}
        left = onnx.TensorProto.INT64 in kinds or (node.op_type == "Relu" and "Softplus" in others)
        return Placement("rejected", "") if left else Placement("supported", "")


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    onnx.save(parser.parse_model(CHAIN), tmp_path / "m.onnx")
    return cut_graph(read_onnx(tmp_path / "m.onnx"), {})


def explored(graph: Graph, name: str, lab: Scripted) -> Subject:
    subject = Subject(node_variant(graph, name), [(0, name)])
    explore([subject], lab)
    return subject


def surround(subject: Subject, graph: Graph, lab: Lab) -> None:
    explore_surroundings([subject], {0: graph}, {}, lab)


class Compiling(Scripted):
    """Takes whatever does not have the type of the node."""

    def __init__(self) -> None:
        super().__init__()
        self.resolution, self.tried = Resolution(replace(WEBGPU, compiles=True, options=()), "active"), 0

    def answer(self, model: onnx.ModelProto) -> Placement:
        self.tried += 1
        return super().answer(model)


def test_compiling_provider_probes_stop_at_first_factor(graph: Graph) -> None:
    lab = Compiling()
    subject = explored(graph, "a", lab)
    assert {trial.factor for trial in subject.variants} == {"as_is", "type"} and not subject.missing_probes
    assert lab.tried == len(subject.variants), "opsets, attributes, inputs and pairs come after types"


class Naming(Scripted):
    """Leaves every node, and names an option of which only the library knows, whose value is a file."""

    def answer(self, model: onnx.ModelProto) -> Placement:
        return Placement("rejected", "Relu filtered off by the affinity provider option")


def test_option_named_by_provider_is_probed_at_its_default(graph: Graph) -> None:
    lab = Naming(affinity="a.json", speed="1")
    subject = explored(graph, "c", lab)
    assert lab.asked == [("affinity", "")]
    assert (reason_from_probes(subject.probe(0, "c"), WEBGPU.ort_name) or ("",))[0] == "option_needed"


def test_option_is_not_probed_if_already_set_or_irrelevant(graph: Graph) -> None:
    set_already = Scripted(wide="1")
    assert OPTION not in {trial.factor for trial in explored(graph, "a", set_already).variants}
    asked_otherwise = explored(graph, "a", Scripted(wide="0")).variants[-1]
    assert (asked_otherwise.factor, asked_otherwise.outcome) == (OPTION, "supported")
    taken = Scripted()
    explored(graph, "c", taken)
    assert set_already.asked == taken.asked == []


def test_neighbourhoods_of_node_with_many_consumers_are_bounded(tmp_path: Path) -> None:
    lines = "".join(f"  [r{n}] h{n} = Relu(h)\n" for n in range(MOST_TOGETHER + 1))
    outputs = ", ".join(f"float[2] h{n}" for n in range(MOST_TOGETHER + 1))
    text = f'<ir_version: 10, opset_import: ["" : 21]>\ng (float[2] x) => ({outputs}) {{\n  [hub] h = Neg(x)\n{lines}}}'
    onnx.save(parser.parse_model(text), tmp_path / "hub.onnx")
    found = list(neighbourhoods(cut_graph(read_onnx(tmp_path / "hub.onnx"), {}), "hub"))
    assert found and max(len(model.graph.node) for _, model in found) == 2


def test_option_required_in_neighbourhood_is_the_reason(graph: Graph) -> None:
    wide = Option("wide", "bool", "0", "", probe_value=ProbeValue("1", operators=("Relu",)))
    lab = Scripted()
    lab.resolution = replace(lab.resolution, provider=replace(WEBGPU, options=(wide,)))
    subject = explored(graph, "c", lab)
    surround(subject, graph, lab)
    (shown,) = conclusions(subject.probe(0, "c"))
    assert shown.code == "option_needed" and lab.asked == [("wide", "1")]
    assert "b (Cast) it does not support it; with webgpu.wide=1" in shown.evidence


def test_probe_options_are_provider_options_with_non_default_values() -> None:
    every = [(provider, option) for provider in known_providers().values() for option in provider.options]
    opening = [pair for pair in every if pair[1].probe_value is not None]
    assert opening
    for provider, option in opening:
        assert option.probe_value is not None and option.probe_value.value != option.default, provider.name
        assert not option.session_key, "experiments pass on what the provider itself takes"
        assert all(dtypes.find(name) is not None for name in option.probe_value.elements)
