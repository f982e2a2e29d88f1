"""Attention over a growing cache, in optimum's layout, so that its ORTModelForCausalLM loads the package.

    key ─── Concat(past key) ─── present key ────────────────┐
    value ─ Concat(past value) ─ present value ────┐         │
    query · scale ── MatMul(present key transposed) ── Where(allowed, ·, lowest) ── Softmax ── MatMul ── output

Past has P rows and present P + S, from P = 0. Nothing is written in place: every step copies the whole cache. The mask
[B, T] has length T = P + S. A key is visible when it is not after its query and its mask entry is not 0, which hides
left padding. Standard operators only, up to opset 18.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.export.trace.attention import Cursor, Lowering, Reading
from partita.export.trace.attention.primitives import attend

if TYPE_CHECKING:
    import torch

MASK = Cursor("attention_mask", "mask", "int64", per_row=True, per_key=True)
"""Named as in optimum."""


def _write(
    past: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, cursors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """past [B, Hkv, P, D] followed by new [B, Hkv, S, D].

    Written as ONNX's operator, because the trace does not know that T, the length of the mask, is P + S.
    """
    import torch.onnx.ops as onnx_ops

    shape = (*past.shape[:2], cursors[0].shape[1], past.shape[3])
    return onnx_ops.symbolic("onnx::Concat", (past, new), {"axis": 2}, dtype=past.dtype, shape=shape, version=13)


def _attend(reading: Reading) -> torch.Tensor:
    """Attention of [B, H, S, D] over the T rows of keys and values; returns [B, S, H, Dv]."""
    return attend(reading, reading.cursors[0])


LOWERING = Lowering(
    name="growing",
    rank=9,
    merit="the cache layout of optimum, in standard operators",
    opset=18,
    min_opset=18,
    domains=(),
    cursors=(MASK,),
    write=_write,
    attend=_attend,
    takes_mask=True,
    same_kv_width=False,
    fused="none",
    appends_in_batches=True,
    grows=True,
)
