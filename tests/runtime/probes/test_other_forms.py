"""Other nodes of an operator: legal ones, in the node's version, told apart from the node itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import parser

from partita.runtime.probes.cases import COMPANY, NODE, Case, case_model, fingerprint, node_case
from partita.runtime.probes.graphs import cut_proto
from partita.runtime.probes.other_forms import MOST_COMPILED, other_forms

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "own" : 1]>\n'


def case_of(text: str, opset: int = 21) -> Case:
    return node_case(cut_proto(parser.parse_model(HEAD.format(opset=opset) + text), Path(), {}), "n")


CAST = "g (double[4] x) => (uint8[4] y) {\n  [n] y = Cast<to=2>(x)\n}"


def test_forms_have_the_nodes_own_types_first_and_say_so():
    found = other_forms(case_of(CAST), compiles=False)
    assert found[0].same_types and found[0].words.startswith("T1 float64, T2 uint8")
    assert any(not form.same_types and "float32" in form.words for form in found)
    for form in found:
        (node,) = form.model.graph.node
        assert (node.name, node.op_type) == (NODE, "Cast")
        assert [entry.version for entry in form.model.opset_import if not entry.domain] == [21]


def test_none_is_the_node_itself_and_all_are_different():
    plain = case_of("g (float[4] x) => (float[4] y) {\n  [n] y = Celu(x)\n}")
    keys = [fingerprint(form.model) for form in other_forms(plain, compiles=False)]
    assert len(set(keys)) == len(keys) and fingerprint(case_model(plain)) not in keys


def test_they_are_of_the_version_that_the_node_has():
    old = other_forms(
        case_of("g (float[4] x) => (float[2,2] y) <int64[2] s = {2, 2}> {\n  [n] y = Reshape(x, s)\n}", 13),
        compiles=False,
    )
    assert old and {entry.version for form in old for entry in form.model.opset_import if not entry.domain} == {13}


def test_a_provider_that_compiles_gets_few_and_never_one_node_alone():
    found = other_forms(case_of("g (float[4,4] x) => (float[4,4] y) {\n  [n] y = Softmax(x)\n}"), compiles=True)
    assert 0 < len(found) <= MOST_COMPILED
    assert {tuple(node.name for node in form.model.graph.node) for form in found} == {(NODE, COMPANY)}


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] y) {\n  [n] y = own.Mystery<a=1>(x)\n}",
        "g (float[4] x) => (float[4] y) {\n  [n] y = NoSuchOperator(x)\n}",
    ],
)
def test_an_operator_that_nobody_describes_has_none(text):
    assert other_forms(case_of(text), compiles=False) == ()


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
        if form.same_types and f"{variable} " in form.words:
            assert f"{variable} {kind}" in form.words
    assert any(not form.same_types for form in found)


def test_bodies_have_types_of_their_own():
    branches = "then_branch = a () => (float[4] p) { p = Neg(x) }, else_branch = b () => (float[4] q) { q = Abs(x) }"
    text = f"g (bool c, float[4] x) => (float[4] y) {{\n  [n] y = If(c) <{branches}>\n}}"
    assert not any(form.same_types for form in other_forms(case_of(text), compiles=False))
