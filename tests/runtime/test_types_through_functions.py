"""Types and nodes that only a function tells: operators of ONNX without a rule for their types, and local functions."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.runtime.lab.graph import cut_graph
from partita.runtime.lab.variant import node_variant
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import element_of, sizes_of, tensor_types

NORMALISED = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (float16[1,4,8,8] x{more}) => (y) {constants}{{\n"
    "  [norm] h = GroupNormalization<num_groups=2>(x, s, b)\n  [after] y = Relu(h)\n}}"
)
FED = NORMALISED.format(more=", float16[4] s, float16[4] b", constants="")
CONSTANT = NORMALISED.format(more="", constants="<float16[4] s = {1,1,1,1}, float16[4] b = {0,0,0,0}> ")
CALLING = (
    '<ir_version: 10, opset_import: ["" : 22, "local" : 1]>\n'
    "g (float[2,4] x) => (float[2,4] y) {{\n  [call] y = local.Part(x)\n}}\n"
    '<domain: "local", opset_import: ["" : {opset}]>\nPart (a) => (b) {{\n  [one] b = Selu(a)\n}}'
)


@pytest.mark.parametrize("text", [FED, CONSTANT], ids=["fed", "constant"])
def test_what_group_normalization_makes_has_the_type_that_its_function_gives(text: str) -> None:
    types = tensor_types(parser.parse_model(text))
    for name in ("h", "y"):
        assert element_of(types[name]) == onnx.TensorProto.FLOAT16
        assert sizes_of(types[name]) == (1, 4, 8, 8)


@pytest.mark.parametrize("opset", [18, 21, 22])
def test_a_node_of_a_local_function_is_tried_in_the_version_of_the_model(opset: int, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(CALLING.format(opset=opset)), tmp_path / "m.onnx")
    case = node_variant(cut_graph(read_onnx(tmp_path / "m.onnx"), {}), "_inlfunc_Part_one")
    assert case.node.op_type == "Selu" and case.opsets[""] == 22


SHARED = (
    '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>\n'
    "g (float[2,4] x) => (float[2,4] y) {\n  [a] a = local.First(x)\n  [b] b = local.Second(a)\n"
    "  [wide] c = Cast<to=11>(b)\n  [d] d = local.Second(c)\n  [e] e = local.First_1(d)\n"
    "  [back] y = Cast<to=1>(e)\n}\n"
    '<domain: "local", opset_import: ["" : 21]>\nFirst (a) => (b) {\n  [n] b = Selu(a)\n}\n'
    '<domain: "local", opset_import: ["" : 21]>\nSecond (a) => (b) {\n  [n] b = Abs(a)\n}\n'
    '<domain: "local", opset_import: ["" : 21]>\nFirst_1 (a) => (b) {\n  [n] b = Softsign(a)\n}'
)


@pytest.mark.parametrize(
    ("name", "made", "op_type", "element"),
    [
        ("_inlfunc_First_n", "float32[2,4]", "Selu", onnx.TensorProto.FLOAT),
        ("_inlfunc_Second_n", "float32[2,4]", "Abs", onnx.TensorProto.FLOAT),
        ("_inlfunc_Second_token_0_n", "float64[2,4]", "Abs", onnx.TensorProto.DOUBLE),
        ("_inlfunc_Second_token_0_n_token_3", "float64[2,4]", "Abs", onnx.TensorProto.DOUBLE),
        ("_inlfunc_First_1_n_nchwc", "float64[2,4]", "Softsign", onnx.TensorProto.DOUBLE),
    ],
)
def test_nodes_of_functions_are_told_apart_by_function_and_by_what_they_made(
    name: str, made: str, op_type: str, element: int, tmp_path: Path
) -> None:
    onnx.save(parser.parse_model(SHARED), tmp_path / "m.onnx")
    graph = cut_graph(read_onnx(tmp_path / "m.onnx"), {}).with_observed_types({name: (made,)})
    case = node_variant(graph, name)
    assert case.node.op_type == op_type
    assert element_of(case.feeds[0].kind) == element


def test_a_split_into_more_parts_than_it_has_number_of_does_not_end_the_process() -> None:
    text = '<ir_version: 9, opset_import: ["" : 20]>\ng (int64[4] x) => (a, b, c, d) {\n  {node}\n}'
    split = "[planted] a, b, c, d = Split<num_outputs={count}>(x)"
    legal, illegal = (parser.parse_model(text.replace("{node}", split.replace("{count}", count))) for count in "43")
    assert sizes_of(tensor_types(legal)["a"]) == (1,)
    assert "a" not in tensor_types(illegal)
