"""Variants of a node: a change makes the case that it says, and many cases are one model that ONNX Runtime opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita.runtime.probes.cases import Case, fingerprint, node_case
from partita.runtime.probes.graphs import cut_proto
from partita.runtime.probes.variants import Change, Sheet, complaint, sheets, vary

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "own" : 1]>\n'
CaseOf = Callable[..., Case]

ADD = "g (float[N,4] x, float[4] z) => (float[N,4] y) {\n  [n] y = Add(x, z)\n}"
CAST = "g (float[4] x) => (float16[4] y) {\n  [n] y = Cast<to=10>(x)\n}"
CLIP = "g (float[4] x) => (float[4] y) <float low = {1}, float high = {2}> {\n  [n] y = Clip(x, low, high)\n}"
POOL = (
    "g (float[1,4,8,8] x) => (float[1,4,4,4] y, int64[1,4,4,4] i) {\n"
    "  [n] y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)\n}"
)
RESHAPE = (
    "g (float[N,4] x) => (float[A] y) {\n  s = Shape(x)\n  p = ReduceProd<keepdims=1>(s)\n  [n] y = Reshape(x, p)\n}"
)
BRANCH = (
    "g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {\n  h = Relu(x)\n"
    "  [n] y = If(c)<then_branch = t () => (float[4] a) { a = Mul(h, w) },"
    " else_branch = e () => (float[4] b) { q = Neg(h) b = Sub(q, x) }>\n}"
)
EVERY_NUMBER = [
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.UINT16,
    TensorProto.UINT32,
    TensorProto.UINT64,
    TensorProto.BOOL,
    TensorProto.BFLOAT16,
]


def case(text: str, **sizes: tuple[int, ...]) -> Case:
    return node_case(cut_proto(parser.parse_model(HEAD + text), Path(), sizes), "n")


def varied(text: str, change: Change, **sizes: tuple[int, ...]) -> Case:
    made = vary(case(text, **sizes), change)
    assert made is not None
    return made


def inputs(made: Case) -> list[tuple[int, list[int | str], bool]]:
    """Element type, sizes, and whether it is a constant, of every input."""
    return [
        (
            feed.kind.tensor_type.elem_type,
            [size.dim_value or size.dim_param for size in feed.kind.tensor_type.shape.dim],
            feed.constant is not None,
        )
        for feed in made.feeds
    ]


def values(made: Case, name: str) -> object:
    feed = made.feed(name)
    assert feed is not None and feed.constant is not None
    return numpy_helper.to_array(feed.constant).tolist()


def opened(sheet: Sheet, *, optimise: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(sheet.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# --- one variant ---------------------------------------------------------------------------------------------------


def test_nothing_changed_is_the_case_itself():
    assert vary(case(ADD), Change()) == case(ADD)


def test_types_sizes_and_constants_of_inputs_change_one_by_one_and_together():
    halves = Change(elements={"i0": TensorProto.FLOAT16, "i1": TensorProto.FLOAT16})
    assert inputs(varied(ADD, halves)) == [(TensorProto.FLOAT16, ["N", 4], False), (TensorProto.FLOAT16, [4], False)]
    rank = Change(sizes={"i0": (1, 2, 4)})
    assert inputs(varied(ADD, halves | rank))[0] == (TensorProto.FLOAT16, [1, 2, 4], False)
    made = varied(ADD, halves | Change(constants={"i1": None}))
    assert inputs(made)[1] == (TensorProto.FLOAT16, [4], True) and values(made, "i1") == [0, 0, 0, 0]
    assert made.feeds[1].constant is not None and made.feeds[1].constant.data_type == TensorProto.FLOAT16


def test_an_input_becomes_a_constant_of_the_values_that_are_given_or_that_it_had_in_the_run():
    given = numpy_helper.from_array(np.arange(4, dtype=np.float32), "whatever it was called")
    assert values(varied(ADD, Change(constants={"i1": given})), "i1") == [0, 1, 2, 3]
    known = varied(RESHAPE, Change(constants={"i1": None}), x=(3, 4))
    assert values(known, "i1") == [12] and inputs(known)[0][1] == ["N", 4], "zeros would be another Reshape"


def test_an_input_of_unknown_sizes_stays_one():
    assert not inputs(varied(ADD, Change(constants={"i0": None})))[0][2]


def test_a_constant_keeps_its_values_in_another_type_and_can_be_an_input():
    made = varied(CLIP, Change(elements=dict.fromkeys(("i0", "i1", "i2"), TensorProto.INT32)))
    assert (values(made, "i1"), values(made, "i2")) == (1, 2)
    assert [entry[2] for entry in inputs(varied(CLIP, Change(fed=frozenset({"i1"}))))] == [False, False, True]


def test_all_sizes_are_those_of_the_run_and_what_follows_from_them_is_a_constant():
    made = varied(RESHAPE, Change(fixed=True), x=(3, 4))
    assert inputs(made)[0][1] == [3, 4] and values(made, "i1") == [12]


def test_inputs_and_outputs_are_left_out_by_their_places():
    assert list(varied(CLIP, Change(inputs_left_out=frozenset({1}))).node.input) == ["i0", "", "i2"]
    fewer = varied(CLIP, Change(inputs_left_out=frozenset({1, 2})))
    assert list(fewer.node.input) == ["i0"] and [feed.name for feed in fewer.feeds] == ["i0"]
    assert list(varied(POOL, Change(outputs_left_out=frozenset({1}))).node.output) == ["o0"]
    assert vary(case(POOL), Change(outputs_left_out=frozenset({0, 1}))) is None


def test_attributes_get_other_values_or_go():
    wide = Change(attributes={"strides": helper.make_attribute("strides", [1, 1])})
    shown = {entry.name: list(entry.ints) for entry in varied(POOL, wide).node.attribute}
    assert shown == {"kernel_shape": [2, 2], "strides": [1, 1]}
    gone = varied(POOL, wide | Change(attributes={"strides": None}))
    assert [entry.name for entry in gone.node.attribute] == ["kernel_shape"]


def test_another_operator_set_as_far_as_it_has_such_a_form():
    assert varied(CLIP, Change(opset=13)).opsets[""] == 13
    squeeze = "g (float[1,4] x) => (float[4] y) <int64[1] a = {0}> {\n  [n] y = Squeeze(x, a)\n}"
    assert [entry.name for entry in varied(squeeze, Change(opset=11)).node.attribute] == ["axes"], "an input since 13"
    assert vary(case(CLIP.replace("float", "int32")), Change(opset=11)) is None, "integers came with opset 12"


def test_the_case_that_is_varied_stays_as_it_is():
    plain = case(POOL)
    before = fingerprint(sheets([plain])[0].model)
    vary(plain, Change(elements={"i0": TensorProto.FLOAT16}, attributes={"strides": None}, opset=12))
    assert fingerprint(sheets([plain])[0].model) == before


def test_company_goes_with_the_type_that_comes_out():
    """A Cast of truth values makes a number that can be negated; made to text, it has nothing to negate."""
    text = CAST.replace("float[4] x", "bool[4] x")
    to = {element: Change(attributes={"to": helper.make_attribute("to", element)}) for element in (1, 8)}
    for element, operators in ((1, ["Cast", "Neg"]), (8, ["Cast"])):
        (sheet,) = sheets([varied(text, to[element])], company=True)
        assert [node.op_type for node in sheet.model.graph.node] == operators


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(), ""),
        (Change(elements={"i0": TensorProto.FLOAT16}), "inconsistent type"),
        (Change(inputs_left_out=frozenset({1})), "input size 1"),
        (Change(sizes={"i0": (3,)}), "Incompatible dimensions"),
        (Change(attributes={"alpha": helper.make_attribute("alpha", 1.0)}), "Unrecognized attribute: alpha"),
    ],
)
def test_what_is_not_legal_is_told_before_it_spoils_a_sheet(change, said):
    assert said in complaint(varied(ADD, change)) and bool(complaint(varied(ADD, change))) == bool(said)


# --- many in one model ---------------------------------------------------------------------------------------------


def test_every_cast_is_one_model_and_each_is_found_by_its_name():
    cases = [
        varied(CAST, Change(elements={"i0": old}, attributes={"to": helper.make_attribute("to", new)}))
        for old in EVERY_NUMBER
        for new in EVERY_NUMBER
        if old != new
    ]
    (sheet,) = sheets(cases)
    assert len(cases) == 156 and sheet.nodes == {place: f"probe{place}" for place in range(156)}
    named = {node.name: node for node in sheet.model.graph.node}
    assert {name: named[name].attribute[0].i for name in sheet.nodes.values()} == {
        sheet.nodes[place]: made.node.attribute[0].i for place, made in enumerate(cases)
    }
    session = opened(sheet)
    assert len(session.get_inputs()) == len(session.get_outputs()) == 156


def test_variants_compute_what_each_computes_alone():
    """With a body that reads from outside, constants, and inputs that are left out, beside each other."""
    cases = [case(BRANCH), case(CLIP), varied(CLIP, Change(inputs_left_out=frozenset({1}))), case(ADD), case(BRANCH)]
    (sheet,) = sheets(cases)
    session = opened(sheet, optimise=True)
    x = np.array([0.5, 1.5, 2.5, 3.5], np.float32)
    feeds = {
        port.name: np.array(True) if port.type == "tensor(bool)" else x if len(port.shape) == 1 else x[None]
        for port in session.get_inputs()
    }
    results = dict(zip((port.name for port in session.get_outputs()), session.run(None, feeds), strict=True))
    assert results["v0.o0"].tolist() == results["v4.o0"].tolist() == [0.5, 3.0, 7.5, 14.0]
    assert results["v1.o0"].tolist() == [1, 1.5, 2, 2] and results["v2.o0"].tolist() == [0.5, 1.5, 2, 2]
    assert results["v3.o0"].tolist() == [[1, 3, 5, 7]] and len(results) == 5


def test_each_variant_has_its_own_company():
    (sheet,) = sheets([case(BRANCH), case(CLIP), case(ADD)], company=True)
    named = {node.name: node for node in sheet.model.graph.node}
    assert set(named) == {f"{name}{place}" for name in ("probe", "company") for place in range(3)}
    for place in range(3):
        pair = {name for kind in ("probe", "company") for name in (*named[f"{kind}{place}"].input,)}
        assert all(name.startswith(f"v{place}.") for name in pair)
    assert opened(sheet)


def test_each_operator_set_has_a_sheet_of_its_own():
    cases = [case(POOL), varied(POOL, Change(opset=12)), varied(POOL, Change(elements={"i0": TensorProto.FLOAT16}))]
    made = sheets(cases)
    assert [sheet.nodes for sheet in made] == [{0: "probe0", 2: "probe2"}, {1: "probe1"}]
    assert [{entry.domain: entry.version for entry in sheet.model.opset_import}[""] for sheet in made] == [21, 12]
    assert all(opened(sheet) for sheet in made[1:])


def test_names_in_bodies_are_no_names_of_the_sheet():
    text = BRANCH.replace("q = Neg(h) b = Sub(q, x)", "vq = Neg(h) b = Sub(vq, x)")
    (sheet,) = sheets([case(text), case(ADD)])
    assert all(port.name.startswith("vv") for port in sheet.model.graph.input)
    assert opened(sheet)


def test_two_variants_of_one_constant_keep_their_own():
    cases = [varied(CLIP, Change(elements=dict.fromkeys(("i0", "i1", "i2"), new))) for new in (1, 6, 7)]
    (sheet,) = sheets(cases)
    assert [tensor.data_type for tensor in sheet.model.graph.initializer] == [1, 1, 6, 6, 7, 7]
    assert opened(sheet)
