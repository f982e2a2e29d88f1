"""Constants in every form a file may have them, and names that several bodies of control flow use."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita.runtime.lab.graph import cut_graph
from partita.runtime.lab.values import find_constants, known_values
from partita.runtime.lab.variant import node_variant
from partita.runtime.place.onnx_model import read_onnx

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + text)


@pytest.mark.parametrize(
    ("attribute", "dtype", "values"),
    [
        ("value_int = 1", TensorProto.INT64, 1),
        ("value_ints = [1, 2]", TensorProto.INT64, [1, 2]),
        ("value_float = 0.5", TensorProto.FLOAT, 0.5),
        ("value_floats = [0.5, 2.0]", TensorProto.FLOAT, [0.5, 2.0]),
        ("value = int64[2] {3, 4}", TensorProto.INT64, [3, 4]),
    ],
)
def test_a_constant_node_is_a_constant_however_it_is_written(attribute, dtype, values):
    found = find_constants(model(f"g () => (int64 c) {{\n  c = Constant <{attribute}> ()\n}}"))["c"]
    assert found.data_type == dtype
    assert numpy_helper.to_array(found).tolist() == values


def test_strings_and_sparse_constants_are_constants_too():
    text = helper.make_node("Constant", [], ["s"], value_strings=["a", "b"])
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([3], np.int64)), [2, 4])
    graph = helper.make_graph([text], "g", [], [], sparse_initializer=[sparse])
    found = find_constants(helper.make_model(graph))
    assert numpy_helper.to_array(found["s"]).tolist() == [b"a", b"b"] or list(found["s"].string_data) == [b"a", b"b"]
    assert list(found["w"].dims) == [2, 4] and found["w"].data_type == TensorProto.FLOAT


def test_what_follows_from_constants_alone_is_a_constant_of_the_experiment(tmp_path):
    text = """g (float[2,3] x) => (float[2,3] y) {
  one = Constant <value_int = 1> ()
  axis = Identity(one)
  [n] y = CumSum <exclusive = 1> (x, axis)
}"""
    onnx.save(model(text), tmp_path / "m.onnx")
    case = node_variant(cut_graph(read_onnx(tmp_path / "m.onnx"), {}), "n")
    (axis,) = [feed.constant for feed in case.feeds if feed.constant is not None]
    assert numpy_helper.to_array(axis).tolist() == 1


SIZED = """g () => (float[M] made) {{
  one = Constant <value_floats = [1.0]> ()
  sizes = Constant <value_ints = [{count}]> ()
  first = Constant <value_int = 0> ()
  end = Constant <value_int = {count}> ()
  step = Constant <value_int = 1> ()
  made = {node}
}}"""


@pytest.mark.parametrize("node", ["Expand (one, sizes)", "Tile (one, sizes)", "Range (first, end, step)"])
def test_what_follows_from_constants_is_worked_out_where_it_is_small_and_not_even_made_where_it_is_large(node):
    few = known_values(model(SIZED.format(node=node, count=3)), {})
    assert list(few["made"].dims) == [3]
    tracemalloc.start()
    try:
        many = known_values(model(SIZED.format(node=node, count=1 << 24)), {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "made" not in many
    assert peak < 1 << 22, "a mask of a long text would take all memory"


BODIES = """g (bool c, float[4] x) => (float[4] y) {
  y = If (c) <
    then_branch = a () => (float[4] o) { [wide] t = Cast <to = 7> (x)  [back] o = Cast <to = 1> (t) },
    else_branch = b () => (float[4] o) { [narrow] t = Cast <to = 2> (x)  [again] o = Cast <to = 1> (t) }
  >
}"""


def test_bodies_that_use_one_name_keep_their_types_apart(tmp_path):
    onnx.save(model(BODIES), tmp_path / "m.onnx")
    graph = cut_graph(read_onnx(tmp_path / "m.onnx"), {})
    kinds = {name: node_variant(graph, name).feeds[0].kind.tensor_type.elem_type for name in ("back", "again")}
    assert kinds == {"back": TensorProto.INT64, "again": TensorProto.UINT8}
