"""Small ONNX files, each with one property that a provider reacts to. Static shapes and fixed weights throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
ROWS, WIDTH = 4, 16
LATEST_IR = 10
OPSET = 21
ML = "ai.onnx.ml"


def weight(name: str) -> onnx.TensorProto:
    """[WIDTH, WIDTH] float32, always the same numbers."""
    values = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), dtype=np.float32)
    return numpy_helper.from_array(values / WIDTH, name)


def save(nodes: list[Any], path: Path, *, opset: int = OPSET) -> Path:
    """Write a model x [ROWS, WIDTH] -> y [ROWS, WIDTH] whose weights are called w.

    Every tensor in between has the same shape and says so: not every operator has shape inference.
    """
    inner = [node.output[0] for node in nodes[:-1]]
    graph = helper.make_graph(
        nodes,
        "contract",
        [helper.make_tensor_value_info("x", FLOAT, [ROWS, WIDTH])],
        [helper.make_tensor_value_info("y", FLOAT, [ROWS, WIDTH])],
        [weight("w")],
        value_info=[helper.make_tensor_value_info(name, FLOAT, [ROWS, WIDTH]) for name in inner],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(ML, 3)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=LATEST_IR)
    onnx.save(model, path)
    return path


def matmul_relu(path: Path, *, opset: int = OPSET) -> Path:
    """MatMul, Relu: what every provider takes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="layer/MatMul"),
        helper.make_node("Relu", ["h"], ["y"], name="layer/Relu"),
    ]
    return save(nodes, path, opset=opset)


def old_names(path: Path) -> Path:
    """MatMul and Relu in three layers, with names as torch's older exporter writes them."""
    nodes, last = [], "x"
    for layer in range(3):
        for operator, inputs in (("MatMul", [last, "w"]), ("Relu", [f"m{layer}"])):
            last = "y" if (layer, operator) == (2, "Relu") else f"{operator[0].lower()}{layer}"
            name = f"/layers.{layer}/mlp/{operator}"
            nodes.append(helper.make_node(operator, inputs, [last], name=name))
    return save(nodes, path)


def island(path: Path) -> Path:
    """MatMul, Scaler, MatMul: no provider but the CPU has a kernel for ai.onnx.ml's Scaler, so it is an island."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first/MatMul"),
        helper.make_node("Scaler", ["h"], ["s"], name="island/Scaler", domain=ML, offset=[0.5], scale=[2.0]),
        helper.make_node("MatMul", ["s", "w"], ["y"], name="last/MatMul"),
    ]
    return save(nodes, path)


def branches(path: Path) -> Path:
    """If with a Scaler in either body: nodes for the CPU that are not in the main graph."""
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, [ROWS, WIDTH]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="layer/MatMul"),
        helper.make_node("If", ["c"], ["y"], name="branch/If", then_branch=body("then"), else_branch=body("else")),
    ]
    outputs = [helper.make_tensor_value_info("y", FLOAT, [ROWS, WIDTH])]
    graph = helper.make_graph(nodes, "contract", inputs, outputs, [weight("w")])
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(ML, 3)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=LATEST_IR), path)
    return path


def body(name: str) -> onnx.GraphProto:
    """A body of `branches`: Scaler, Relu on the outer h."""
    nodes = [
        helper.make_node("Scaler", ["h"], [f"{name}_s"], name=f"{name}/Scaler", domain=ML, offset=[0.5], scale=[2.0]),
        helper.make_node("Relu", [f"{name}_s"], [f"{name}_y"], name=f"{name}/Relu"),
    ]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, [ROWS, WIDTH])])
