"""Small ONNX files, each with one property that a provider reacts to. Static shapes and fixed weights throughout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

WIDTH = 16
FLOAT = f"float[4,{WIDTH}]"
OPSET = 21
SCALER = "ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]>"


def save(path: Path, text: str, names: Sequence[str], *, opset: int = OPSET) -> Path:
    """Write a model of this text, whose nodes have these names; w is [WIDTH, WIDTH], always the same numbers.

    Every tensor in between has its shape in the text: not every operator has shape inference.
    """
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "ai.onnx.ml" : 3]> contract '
    model = parser.parse_model(head + text)
    bodies = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]
    for node, name in zip((node for graph in (model.graph, *bodies) for node in graph.node), names, strict=True):
        node.name = name
    values = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values / WIDTH, "w"))
    onnx.save(model, path)
    return path


def matmul_relu(path: Path, *, opset: int = OPSET) -> Path:
    """MatMul, Relu: what every provider takes."""
    text = f"({FLOAT} x) => ({FLOAT} y) <{FLOAT} h> {{ h = MatMul(x, w) y = Relu(h) }}"
    return save(path, text, ("layer/MatMul", "layer/Relu"), opset=opset)


def old_names(path: Path) -> Path:
    """MatMul and Relu in three layers, with names as torch's older exporter writes them."""
    inner = ", ".join(f"{FLOAT} {name}" for name in ("m0", "r0", "m1", "r1", "m2"))
    nodes = "m0 = MatMul(x, w) r0 = Relu(m0) m1 = MatMul(r0, w) r1 = Relu(m1) m2 = MatMul(r1, w) y = Relu(m2)"
    names = [f"/layers.{layer}/mlp/{operator}" for layer in range(3) for operator in ("MatMul", "Relu")]
    return save(path, f"({FLOAT} x) => ({FLOAT} y) <{inner}> {{ {nodes} }}", names)


def island(path: Path) -> Path:
    """MatMul, Scaler, MatMul: no provider but the CPU has a kernel for ai.onnx.ml's Scaler, so it is an island."""
    nodes = f"h = MatMul(x, w) s = {SCALER} (h) y = MatMul(s, w)"
    names = ("first/MatMul", "island/Scaler", "last/MatMul")
    return save(path, f"({FLOAT} x) => ({FLOAT} y) <{FLOAT} h, {FLOAT} s> {{ {nodes} }}", names)


def branches(path: Path) -> Path:
    """If with a Scaler in either body: nodes for the CPU that are not in the main graph."""
    then, other = (
        f"{name}_branch = {name} () => ({FLOAT} {name}_y) {{ {name}_s = {SCALER} (h) {name}_y = Relu({name}_s) }}"
        for name in ("then", "else")
    )
    nodes = f"h = MatMul(x, w) y = If(c) <{then}, {other}>"
    names = ("layer/MatMul", "branch/If", "then/Scaler", "then/Relu", "else/Scaler", "else/Relu")
    return save(path, f"({FLOAT} x, bool c) => ({FLOAT} y) {{ {nodes} }}", names)
