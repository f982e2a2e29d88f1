"""Probes beyond the node alone: provider options, and the neighbours of a node that is supported alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx
import pytest

from partita import dtypes
from partita.diagnosis.probe_conclusions import conclusions
from partita.diagnosis.reasons import reason_from_probes
from partita.observations.facts import OPTION
from partita.providers.base import Option, ProbeValue, Provider
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import Subject, explore, explore_surroundings
from partita.runtime.lab.graph import Graph
from partita.runtime.lab.neighbours import MOST_TOGETHER, neighbourhoods
from partita.runtime.lab.placement import NODE, Placement
from partita.runtime.lab.variant import node_variant
from tests.runtime.lab.conftest import Answer, ScriptedLab

WEBGPU = replace(
    known_providers()["webgpu"], options=(Option("wide", "bool", "0", "", probe_value=ProbeValue("1", ("int64",))),)
)
CHAIN = (
    "g (int64[2,4] x) => (float[2,4] y) {\n  [a] h = Neg(x)\n  [b] i = Cast<to=1>(h)\n  [c] j = Relu(i)\n"
    "  [d] k = Elu(j)\n  [e] y = Softplus(k)\n}"
)


def without_int64(model: onnx.ModelProto) -> Placement:
    """Rejects int64, and a Relu in a model with a Softplus."""
    node = next(node for node in model.graph.node if node.name == NODE)
    kinds = {port.type.tensor_type.elem_type for port in (*model.graph.input, *model.graph.output)}
    others = {each.op_type for each in model.graph.node}
    kinds |= {each.i for each in node.attribute if each.name == "to"}
    left = onnx.TensorProto.INT64 in kinds or (node.op_type == "Relu" and "Softplus" in others)
    return Placement("rejected" if left else "supported")


class OptionLab(ScriptedLab):
    """Answers otherwise with another value of an option. `asked`: the tested values."""

    def __init__(
        self,
        answer: Answer = without_int64,
        provider: Provider = WEBGPU,
        answer_with: Answer = lambda _: Placement("supported"),
        **options: str,
    ) -> None:
        super().__init__(answer, Resolution(provider, "active", options=options))
        self.answer_with, self.asked = answer_with, list[tuple[str, str]]()

    def try_with(
        self, option: str, value: str, models: Sequence[onnx.ModelProto], *, one_node: bool = True
    ) -> list[Placement | None]:
        self.asked.append((option, value))
        return [self.answer_with(model) for model in models]


@pytest.fixture
def graph(cut) -> Graph:
    return cut(CHAIN)


def explored(graph: Graph, name: str, lab: OptionLab) -> Subject:
    subject = Subject(node_variant(graph, name), [(0, name)])
    explore([subject], lab)
    return subject


def test_compiling_provider_probes_stop_at_first_factor(graph: Graph) -> None:
    lab = OptionLab(provider=replace(WEBGPU, compiles=True, options=()))
    subject = explored(graph, "a", lab)
    assert {trial.factor for trial in subject.variants} == {"as_is", "type"} and not subject.missing_probes
    assert len(lab.models) == len(subject.variants), "opsets, attributes, inputs and pairs come after types"


def test_option_named_by_provider_is_probed_at_its_default(graph: Graph) -> None:
    """Only the library knows this option, whose value is a file."""
    named = Placement("rejected", "Relu filtered off by the affinity provider option")
    lab = OptionLab(lambda _: named, affinity="a.json", speed="1")
    subject = explored(graph, "c", lab)
    assert lab.asked == [("affinity", "")]
    assert (reason_from_probes(subject.probe(0, "c"), WEBGPU.ort_name) or ("",))[0] == "option_needed"


def test_option_is_not_probed_if_already_set_or_irrelevant(graph: Graph) -> None:
    already_set = OptionLab(wide="1")
    assert OPTION not in {trial.factor for trial in explored(graph, "a", already_set).variants}
    other_value = explored(graph, "a", OptionLab(wide="0")).variants[-1]
    assert (other_value.factor, other_value.outcome) == (OPTION, "supported")
    irrelevant = OptionLab()
    explored(graph, "c", irrelevant)
    assert already_set.asked == irrelevant.asked == []


def test_option_and_change_together_are_the_cause(cut) -> None:
    """The provider supports other nodes of the operator, and this node with an option and without its attribute."""

    def other_sizes(model: onnx.ModelProto) -> Placement:
        sizes = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
        return Placement("supported" if sizes == [3, 4, 5] else "rejected")

    def without_attribute(model: onnx.ModelProto) -> Placement:
        return Placement("rejected" if any(node.attribute for node in model.graph.node) else "supported")

    wide = Option("wide", "bool", "0", "", probe_value=ProbeValue("1", operators=("Elu",)))
    lab = OptionLab(other_sizes, replace(WEBGPU, options=(wide,)), without_attribute)
    subject = explored(cut("g (float[2] x) => (float[2] y) {\n  [n] y = Elu<alpha=2.0>(x)\n}"), "n", lab)
    found = conclusions(subject.probe(0, "n"))
    assert [each.code for each in found] == ["option_needed", "attribute_unsupported"]
    assert "with webgpu.wide=1 in place of webgpu.wide=0 and without alpha=2 the provider" in found[0].evidence


def test_neighbourhoods_of_node_with_many_consumers_are_bounded(cut) -> None:
    lines = "".join(f"  [r{n}] h{n} = Relu(h)\n" for n in range(MOST_TOGETHER + 1))
    outputs = ", ".join(f"float[2] h{n}" for n in range(MOST_TOGETHER + 1))
    found = list(neighbourhoods(cut(f"g (float[2] x) => ({outputs}) {{\n  [hub] h = Neg(x)\n{lines}}}"), "hub"))
    assert found and max(len(model.graph.node) for _, model in found) == 2


def test_option_required_in_neighbourhood_is_the_reason(graph: Graph) -> None:
    wide = Option("wide", "bool", "0", "", probe_value=ProbeValue("1", operators=("Relu",)))
    lab = OptionLab(provider=replace(WEBGPU, options=(wide,)))
    subject = explored(graph, "c", lab)
    explore_surroundings([subject], {0: graph}, {}, lab)
    (shown,) = conclusions(subject.probe(0, "c"))
    assert shown.code == "option_needed" and lab.asked == [("wide", "1")]
    assert "b (Cast) it does not support it; with webgpu.wide=1" in shown.evidence


def test_probe_options_are_provider_options_with_non_default_values() -> None:
    options = [option for provider in known_providers().values() for option in provider.options]
    opening = [(option, option.probe_value) for option in options if option.probe_value is not None]
    assert opening
    for option, probe in opening:
        assert probe.value != option.default and not option.session_key, option.name
        assert all(dtypes.find(name) is not None for name in probe.elements)
