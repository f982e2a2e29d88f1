"""An 8-bit embedding in standard operators: rows are gathered as integers, then scaled.

    ids ─ Gather(E uint8 [V, M, B]) ─ DequantizeLinear(1, 128) ─┐
    ids ─ Gather(scales [V, M, 1]) ─────────────────────────── Mul ─ Reshape [B, S, K] ─ e

DequantizeLinear with scale 1 is a Cast and a Sub that compilers support; OpenVINO does not cast 8-bit integers from
outside its compiled part.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partita.export.quantise.forms.base import LookUp, Place, Weight
from partita.export.quantise.write.layouts import InBlocks


def _look_up(place: Place, ids: ir.Value, weight: Weight) -> ir.Value:
    data, scales = weight.values
    assert ids.shape is not None and scales.dtype is not None
    before, kind = list(ids.shape), scales.dtype
    size = weight.packing.block_size
    blocks = [*before, weight.width // size, size]
    rows = place.node("Gather", [data, ids], dtype=data.dtype, shape=blocks)
    one = place.constant(np.array(1, kind.numpy()), f"rows.one.{kind.name.lower()}")
    middle = place.constant(np.array(weight.packing.grid.middle, np.uint8), "rows.middle")
    steps = place.node("DequantizeLinear", [rows, one, middle], dtype=kind, shape=blocks)
    factors = place.node("Gather", [scales, ids], dtype=kind, shape=[*blocks[:-1], 1])
    scaled = place.node("Mul", [steps, factors], dtype=kind, shape=blocks)
    # The batch is constant, the number of tokens may be symbolic.
    sizes = [size if isinstance(size, int) else -1 for size in (*before, weight.width)]
    shape = place.constant(np.array(sizes, np.int64), f"{data.name}.shape")
    return place.node("Reshape", [scaled, shape], dtype=kind, shape=[*before, weight.width])


LOOK_UP = LookUp(InBlocks(), _look_up, symmetric=True)
