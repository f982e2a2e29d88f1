"""An embedding in 8 bits, in standard operators: rows are gathered as integers, and scaled.

ids ─ Gather(E int8 [V, M, B]) ─ Cast ─┐
ids ─ Gather(scales [V, M, 1]) ────── Mul ─ Reshape [B, S, K] ─ e
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partita.export.quantisation.forms.base import LookUp, Place, Weight
from partita.export.quantisation.layouts import InBlocks


def _look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert ids.shape is not None and scales.dtype is not None
    before = list(ids.shape)
    count, size = weight.width // weight.packing.block_size, weight.packing.block_size
    rows = place.node("Gather", [data, ids], dtype=data.dtype, shape=[*before, count, size])
    wide = place.node(
        "Cast", [rows], dtype=scales.dtype, shape=[*before, count, size], attributes={"to": int(scales.dtype)}
    )
    factors = place.node("Gather", [scales, ids], dtype=scales.dtype, shape=[*before, count, 1])
    scaled = place.node("Mul", [wide, factors], dtype=scales.dtype, shape=[*before, count, size])
    # Batches are fixed in a graph, numbers of tokens may not be.
    sizes = [size if isinstance(size, int) else -1 for size in (*before, weight.width)]
    shape = place.constant(np.array(sizes, np.int64), f"{data.name}.shape")
    return place.node("Reshape", [scaled, shape], dtype=scales.dtype, shape=[*before, weight.width])


LOOK_UP = LookUp(InBlocks(), _look_up, symmetric=True)
