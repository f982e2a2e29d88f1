"""Small ONNX files with weights in them, written as exporters write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def weight(name: str, shape: Sequence[int], dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def model(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], domains: tuple[str, ...] = ("",)
) -> onnx.ModelProto:
    """A graph with one input and one output."""
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", FLOAT, ["B", "S", 64])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        weights,
    )
    opsets = [helper.make_opsetid(domain, 21 if not domain else 1) for domain in domains]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="by hand")


def save(proto: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    """Write it; `external`: all weights beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        data = f"{path.name}.data"
        onnx.save(proto, path, save_as_external_data=True, location=data, size_threshold=0, convert_attribute=True)
    else:
        onnx.save(proto, path)
    return path
