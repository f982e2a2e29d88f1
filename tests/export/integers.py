"""What a graph computes in integers of 64 bits: a provider without such kernels would leave it to the CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto

from partita.runtime.place.tensor_types import tensor_types


def wide_integers(path: Path) -> dict[str, str]:
    """Values of 64-bit integers that nodes make, and values of which no type is known, by the operator."""
    model = onnx.load(path, load_external_data=False)
    types = tensor_types(model)
    found = {}
    for node in model.graph.node:
        for name in filter(None, node.output):
            kind = types[name].tensor_type.elem_type if name in types else TensorProto.UNDEFINED
            if kind in (TensorProto.INT64, TensorProto.UNDEFINED):
                found[name] = node.op_type
    return found
