"""A change of a variant changes what it says and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, parser

from partita.runtime.lab.change import Change, vary
from partita.runtime.lab.graph import cut_proto
from partita.runtime.lab.variant import Variant, fingerprint, node_variant, variant_model

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "own" : 1]>\n'

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


def case(text: str, **sizes: tuple[int, ...]) -> Variant:
    return node_variant(cut_proto(parser.parse_model(HEAD + text), Path(), sizes), "n")


def varied(text: str, change: Change, **sizes: tuple[int, ...]) -> Variant:
    made = vary(case(text, **sizes), change)
    assert made is not None
    return made


def inputs(made: Variant) -> list[tuple[int, list[int | str], bool]]:
    """Element type, sizes, and whether it is a constant, of every input."""
    return [
        (
            feed.kind.tensor_type.elem_type,
            [size.dim_value or size.dim_param for size in feed.kind.tensor_type.shape.dim],
            feed.constant is not None,
        )
        for feed in made.feeds
    ]


def values(made: Variant, name: str) -> object:
    feed = made.feed(name)
    assert feed is not None and feed.constant is not None
    return numpy_helper.to_array(feed.constant).tolist()


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


def test_a_constant_keeps_its_values_in_another_type_and_can_be_an_input():
    made = varied(CLIP, Change(elements=dict.fromkeys(("i0", "i1", "i2"), TensorProto.INT32)))
    assert (values(made, "i1"), values(made, "i2")) == (1, 2)
    assert [entry[2] for entry in inputs(varied(CLIP, Change(fed=frozenset({"i1"}))))] == [False, False, True]


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
    before = fingerprint(variant_model(plain))
    vary(plain, Change(elements={"i0": TensorProto.FLOAT16}, attributes={"strides": None}, opset=12))
    assert fingerprint(variant_model(plain)) == before


def test_a_neg_is_added_by_the_type_that_comes_out():
    """A Cast of truth values makes a number that can be negated; made to text, it has nothing to negate."""
    text = CAST.replace("float[4] x", "bool[4] x")
    for element, operators in ((1, ["Cast", "Neg"]), (8, ["Cast"])):
        made = varied(text, Change(attributes={"to": helper.make_attribute("to", element)}))
        assert [node.op_type for node in variant_model(made, auxiliary=True).graph.node] == operators
