"""Other nodes of an operator: legal ones, in the node's version, told apart from the node itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import parser

from partita.observations.facts import Trial
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import MOST_COMPILED, Experiment, Subject, _other_forms
from partita.runtime.lab.graph import cut_proto
from partita.runtime.lab.laboratory import Cache, Lab
from partita.runtime.lab.variant import AUXILIARY, NODE, Variant, node_variant

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "own" : 1]>\n'


def case_of(text: str, opset: int = 21) -> Variant:
    return node_variant(cut_proto(parser.parse_model(HEAD.format(opset=opset) + text), Path(), {}), "n")


def other_forms(variant: Variant, *, compiles: bool) -> list[Experiment]:
    provider = known_providers()["openvino" if compiles else "webgpu"]
    subject = Subject(variant, [(0, "n")], [Trial("as_is", "", "left", "")])
    return list(_other_forms(subject, Lab(Resolution(provider, "active"), Cache(None), 0.0, {})))


CAST = "g (double[4] x) => (uint8[4] y) {\n  [n] y = Cast<to=2>(x)\n}"


def test_forms_have_the_nodes_own_types_first_and_say_so():
    found = other_forms(case_of(CAST), compiles=False)
    assert not found[0].trial.parts and found[0].trial.change.startswith("T1 float64, T2 uint8")
    assert any(form.trial.parts and "float32" in form.trial.change for form in found)
    for form in found:
        (node,) = form.model.graph.node
        assert (node.name, node.op_type) == (NODE, "Cast")
        assert [entry.version for entry in form.model.opset_import if not entry.domain] == [21]


def test_they_are_of_the_version_that_the_node_has():
    old = other_forms(
        case_of("g (float[4] x) => (float[2,2] y) <int64[2] s = {2, 2}> {\n  [n] y = Reshape(x, s)\n}", 13),
        compiles=False,
    )
    assert old and {entry.version for form in old for entry in form.model.opset_import if not entry.domain} == {13}


def test_a_provider_that_compiles_gets_few_and_never_one_node_alone():
    found = other_forms(case_of("g (float[4,4] x) => (float[4,4] y) {\n  [n] y = Softmax(x)\n}"), compiles=True)
    assert 0 < len(found) <= MOST_COMPILED
    assert {tuple(node.name for node in form.model.graph.node) for form in found} == {(AUXILIARY, NODE)}


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] y) {\n  [n] y = own.Mystery<a=1>(x)\n}",
        "g (float[4] x) => (float[4] y) {\n  [n] y = NoSuchOperator(x)\n}",
    ],
)
def test_an_operator_that_nobody_describes_has_none(text):
    assert other_forms(case_of(text), compiles=False) == []


@pytest.mark.parametrize(
    ("text", "variable", "kind"),
    [
        ("g (double[4,4] x) => (double[4,4] y) {\n  [n] y = EyeLike(x)\n}", "T2", "float64"),
        ("g (float[4] x, float s) => (uint8[4] y) {\n  [n] y = QuantizeLinear(x, s)\n}", "T3", "uint8"),
    ],
)
def test_the_type_of_an_output_that_nothing_names_is_known_all_the_same(text, variable, kind):
    found = other_forms(case_of(text), compiles=False)
    for form in found:
        if (not form.trial.parts) and f"{variable} " in form.trial.change:
            assert f"{variable} {kind}" in form.trial.change
    assert any(form.trial.parts for form in found)
