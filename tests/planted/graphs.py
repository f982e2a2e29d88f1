"""Graphs of the truth test: ONNX's own text format, with weights filled in.

A graph text is what `onnx.parser` reads, e.g. `g (float[4,16] x) => (float[4,16] y) <float[16,16] w> { … }`. Names in
the angle brackets that no node makes and that have no values are weights; they get fixed small numbers. Two underscores
in the name of a node stand for a slash, which the text format does not have in names; `twin_A`, `twin_B` are several
nodes named `twin`; what `ODD` and `LONG` stand for is below.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

LATEST_IR = 10
NAMES: Mapping[str, str] = {
    "ODD": "layer #1: {'a', \"b\"} 100%s <größe> (x;y) `z` $HOME \\ end",
    "LONG": "block/" * 200 + "end",
    "twin_A": "twin",
    "twin_B": "twin",
}
"""Word in a graph text -> the name that the node has instead."""
OPSET = 21


def operators(opset: int, text: str) -> str:
    """The graph text with a header: this opset of ONNX, contrib and classic-ML operators, and own functions, if any."""
    local = '"local" : 1, ' if "local." in text else ""
    imports = f'"" : {opset}, {local}"com.microsoft" : 1, "ai.onnx.ml" : 3'
    return f"<ir_version: {LATEST_IR}, opset_import: [{imports}]>\n{text}"


def build(text: str) -> onnx.ModelProto:
    """The model of a graph text, its weights filled in."""
    model = parser.parse_model(text)
    for node in model.graph.node:
        node.name = NAMES.get(node.name, node.name.replace("__", "/"))
    made = {name for node in model.graph.node for name in node.output}
    given = {tensor.name for tensor in model.graph.initializer}
    random = np.random.default_rng(0)
    for value in list(model.graph.value_info):
        if value.name not in made | given:
            model.graph.initializer.append(weight(value, random))
            model.graph.value_info.remove(value)
    return model


def weight(value: onnx.ValueInfoProto, random: np.random.Generator) -> onnx.TensorProto:
    """Numbers for a weight: ones where its type has no fractions, small random ones elsewhere."""
    tensor = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = [size.dim_value for size in tensor.shape.dim]
    whole = np.issubdtype(dtype, np.integer) or dtype == np.bool_
    values = np.ones(shape) if whole else random.standard_normal(shape) / 10
    return numpy_helper.from_array(np.asarray(values).astype(dtype), value.name)


def save(text: str, path: Path) -> Path:
    """Write the model of a graph text."""
    onnx.save(build(text), path)
    return path
