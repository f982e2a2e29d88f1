"""Nodes that ONNX Runtime puts in the place of a function: found again by operator and types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from partita.runtime.lab.functions import Functions
from partita.runtime.lab.graph import CannotProbeError, Graph, cut_proto


@pytest.fixture
def graph() -> Graph:
    """Two functions, one of which depends on its attributes, after an operator that is none."""
    nodes = [
        helper.make_node("Sin", ["x"], ["a"], name="sin"),
        helper.make_node("CenterCropPad", ["a", "sizes"], ["b"], name="crop", axes=[2, 3]),
        helper.make_node("GroupNormalization", ["x", "ones", "ones"], ["c"], name="norm", num_groups=2),
    ]
    body = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 4, 16, 16])],
        [helper.make_tensor_value_info(name, 1, None) for name in "bc"],
        [
            onnx.numpy_helper.from_array(np.array([8, 8]), "sizes"),
            onnx.numpy_helper.from_array(np.ones(4, np.float32), "ones"),
        ],
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return cut_proto(model, Path(), {"x": (1, 4, 16, 16)})


def test_a_node_of_a_function_has_its_real_types_and_constants(graph: Graph) -> None:
    case = Functions(graph).variant(("crop",), "Gather", ("int64[2]",))
    assert [feed.kind.tensor_type.elem_type for feed in case.feeds] == [onnx.TensorProto.INT64] * 2
    assert [feed.constant is None for feed in case.feeds] == [True, False]
    axes = case.feeds[1].constant
    assert axes is not None
    assert onnx.numpy_helper.to_array(axes).tolist() == [2, 3]


@pytest.mark.parametrize(("made", "element"), [("int64[1]", "INT64"), ("float32[1,2,512]", "FLOAT")])
def test_the_types_of_the_run_tell_one_instance_from_another(graph: Graph, made: str, element: str) -> None:
    case = Functions(graph).variant(("crop", "norm"), "Div", (made,))
    assert case.feeds[0].kind.tensor_type.elem_type == onnx.TensorProto.DataType.Value(element)


@pytest.mark.parametrize(("op_type", "made"), [("CastLike", "float32[]"), ("Mul", "float32[4]"), ("Cast", "float32[]")])
def test_an_attribute_that_is_left_out_is_its_default(op_type: str, made: str) -> None:
    """Swish makes a constant of its alpha, in a function whose CastLike is one as well."""
    ports = [helper.make_tensor_value_info(name, 1, [4]) for name in "xy"]
    body = helper.make_graph([helper.make_node("Swish", ["x"], ["y"], name="swish")], "g", ports[:1], ports[1:])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    case = Functions(cut_proto(model, Path(), {"x": (4,)})).variant(("swish",), op_type, (made,))
    assert case.node.op_type == op_type
    if op_type != "Mul":
        assert case.feeds[0].constant is not None
        assert onnx.numpy_helper.to_array(case.feeds[0].constant) == 1


def test_sizes_that_the_file_leaves_open_stay_open(graph: Graph) -> None:
    case = Functions(graph).variant(("norm",), "Cast", ("float32[1,4,16,16]",))
    assert case.feeds[0].kind.tensor_type.shape.dim[0].dim_value == 0
    assert [size.dim_value for size in case.fixed["i0"].tensor_type.shape.dim] == [1, 4, 16, 16]


@pytest.mark.parametrize(
    ("owners", "op_type", "made"),
    [(("sin",), "Div", ()), (("crop",), "Erf", ()), (("crop",), "Gather", ("float32[2]",)), (("away",), "Div", ())],
)
def test_what_no_function_has_cannot_be_tried(
    graph: Graph, owners: tuple[str, ...], op_type: str, made: tuple[str, ...]
) -> None:
    with pytest.raises(CannotProbeError, match="no name"):
        Functions(graph).variant(owners, op_type, made)
