"""Models of a single node or subgraph for probes: inputs, constants, types and validity."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita.runtime.lab.graph import CannotProbeError, cut_graph, find_constants, known_values
from partita.runtime.lab.placement import ZEROS
from partita.runtime.lab.variant import node_variant, part_model, variant_model, zeros_needed
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import tensor_types

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + text)


@pytest.fixture
def opened(tmp_path):
    """Opens a model in ONNX Runtime, as the child does, and returns the session."""

    def open_model(model: onnx.ModelProto) -> ort.InferenceSession:
        onnx.save(model, tmp_path / "opened.onnx")
        with (tmp_path / ZEROS).open("wb") as file:
            file.truncate(zeros_needed(model))
        return ort.InferenceSession(str(tmp_path / "opened.onnx"), providers=["CPUExecutionProvider"])

    return open_model


def shapes(model: onnx.ModelProto) -> list[list[int | str]]:
    return [
        [size.dim_value or size.dim_param for size in port.type.tensor_type.shape.dim] for port in model.graph.input
    ]


def test_small_constants_keep_their_values(cut):
    graph = cut(
        "g (float[2,3] x) => (float[3,2] y, float[6] z) <int64[1] flat = {6}> {\n"
        "  to = Constant<value = int64[2] {3, 2}>()\n"
        "  [a] y = Reshape(x, to)\n  [b] z = Reshape(x, flat)\n}"
    )
    for name, value in (("a", [3, 2]), ("b", [6])):
        (constant,) = variant_model(node_variant(graph, name)).graph.initializer
        assert numpy_helper.to_array(constant).tolist() == value


PLAIN = "g (float[2,S] x) => (float[2,S] y) { [n] y = MatMul(x, w) }"
BRANCH = (
    "g (float[2,S] x, bool c) => (float[2,S] y) { [n] y = If(c)<then_branch = t () => (float[2,S] a) {"
    " [m] a = MatMul(x, w) }, else_branch = e () => (float[2,S] b) { [o] b = Neg(x) }> }"
)


@pytest.mark.parametrize(("size", "value"), [(4, 0.5), (256, 0.0)])
@pytest.mark.parametrize("text", [PLAIN, BRANCH])
@pytest.mark.parametrize(
    "cut_out", [lambda graph: variant_model(node_variant(graph, "n")), lambda graph: part_model(graph, "n")]
)
def test_small_external_constants_are_read_and_large_are_zero(tmp_path, opened, text, cut_out, size, value):
    """An experiment needs no file of the user's."""
    (tmp_path / "model").mkdir()
    path, proto = tmp_path / "model" / "m.onnx", model(text.replace("S]", f"{size}]"))
    holder = proto.graph if text is PLAIN else proto.graph.node[0].attribute[0].g
    holder.initializer.append(numpy_helper.from_array(np.full((size, size), 0.5, np.float32), "w"))
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    session = opened(cut_out(cut_graph(read_onnx(path), {})))
    values = {"tensor(bool)": np.array(True), "tensor(float)": np.ones((2, size), np.float32)}
    (answer,) = session.run(None, {port.name: values[port.type] for port in session.get_inputs()})
    assert (answer == size * value).all()


def test_input_of_unknown_type_requires_observed_type(cut, opened):
    graph = cut("g (float[4,2] x) => (float[4,2] y) {\n  [mystery] s = own.Mystery(x)\n  [n] y = Relu(s)\n}")
    with pytest.raises(CannotProbeError, match="the type of its input 's' is unknown"):
        node_variant(graph, "n")
    seen = graph.with_observed_types({"mystery": ["float32[4,2]"], "gone": ["float32[1]"]}, {})
    assert shapes(variant_model(node_variant(seen, "n"))) == [[4, 2]]
    assert opened(variant_model(node_variant(seen, "n")))
    with pytest.raises(CannotProbeError, match="is unknown"):
        node_variant(graph.with_observed_types({"mystery": ["something[4,2]"]}, {}), "n")


FORK = (
    "g (float[N,4] x) => (float[N,4] z) <float[4] w = {1,2,3,4}> {\n"
    "  [a] p = Mul(x, w)\n  [b] q = Relu(p)\n  [c] r = Neg(p)\n  [d] s = Add(q, r)\n  [e] z = Sqrt(s)\n}"
)


@pytest.mark.parametrize(
    ("names", "inputs", "outputs"),
    [
        ("a", "x", "p"),
        ("b", "p", "q"),
        ("bc", "p", "qr"),
        ("abcde", "x", "z"),
        ("ad", "xqr", "ps"),
    ],
)
def test_part_model_inputs_and_outputs_match_its_boundary(cut, opened, names, inputs, outputs):
    part = part_model(cut(FORK, x=(2, 4)), list(names))
    assert {port.name for port in part.graph.input} == set(inputs)
    assert {port.name for port in part.graph.output} == set(outputs)
    assert [node.name for node in part.graph.node] == list(names)
    assert shapes(part) == [[2, 4]] * len(inputs), "in the sizes of the run"
    assert opened(part)


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
def test_constant_node_value_is_found_for_every_attribute_form(attribute, dtype, values):
    found = find_constants(model(f"g () => (int64 c) {{\n  c = Constant <{attribute}> ()\n}}"))["c"]
    assert found.data_type == dtype
    assert numpy_helper.to_array(found).tolist() == values


def test_string_and_sparse_constants_are_found():
    text = helper.make_node("Constant", [], ["s"], value_strings=["a", "b"])
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([3], np.int64)), [2, 4])
    graph = helper.make_graph([text], "g", [], [], sparse_initializer=[sparse])
    found = find_constants(helper.make_model(graph))
    assert numpy_helper.to_array(found["s"]).tolist() == [b"a", b"b"] or list(found["s"].string_data) == [b"a", b"b"]
    assert list(found["w"].dims) == [2, 4] and found["w"].data_type == TensorProto.FLOAT


SIZED = """g () => (float[M] made) {{
  one = Constant <value_floats = [1.0]> ()
  sizes = Constant <value_ints = [{count}]> ()
  made = {node}
}}"""


@pytest.mark.parametrize("node", ["Expand (one, sizes)", "Tile (one, sizes)"])
def test_constant_folding_is_limited_to_small_results(node):
    small, large = (model(SIZED.format(node=node, count=count)) for count in (3, 1 << 24))
    few = known_values(small, tensor_types(small))
    assert list(few["made"].dims) == [3]
    tracemalloc.start()
    try:
        many = known_values(large, tensor_types(large))
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


def test_equal_names_in_different_subgraphs_have_separate_types(cut):
    graph = cut(BODIES)
    kinds = {name: node_variant(graph, name).feeds[0].kind.tensor_type.elem_type for name in ("back", "again")}
    assert kinds == {"back": TensorProto.INT64, "again": TensorProto.UINT8}
