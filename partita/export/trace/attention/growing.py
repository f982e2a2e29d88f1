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

from partita.export.trace.attention import AttentionCall, Cursor, Lowering, Reading
from partita.export.trace.attention.primitives import LOWEST, attention_mask, with_sink
from partita.export.trace.operators import product, reshape

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
    import torch

    batch, heads, length, width = reading.query.shape
    kv_heads, total, value_width = reading.keys.shape[1], reading.keys.shape[2], reading.values.shape[-1]
    rows = heads // kv_heads * length
    query = reshape(reading.query * reading.scale, (batch, kv_heads, -1, width), (batch, kv_heads, rows, width))
    scores = product(query, reading.keys.transpose(2, 3))
    scores = reshape(scores, (batch, heads, -1, 0), (batch, heads, length, total))  # 0: T, as in the input
    if reading.softcap:
        scores = torch.tanh(scores / reading.softcap) * reading.softcap
    seen = (reading.cursors[0] != 0)[:, None, None, :]
    if reading.mask is not None:
        scores = scores + reading.mask
    else:
        seen = seen & attention_mask(reading.positions, reading.window, total)
    scores = torch.where(seen, scores, torch.full((), LOWEST, dtype=scores.dtype))
    weights = with_sink(scores, reading.sink) if reading.sink is not None else torch.softmax(scores, dim=-1)
    weights = reshape(weights, (batch, kv_heads, -1, 0), (batch, kv_heads, rows, total))
    shape = (batch, heads, length, value_width)
    output = reshape(product(weights, reading.values), (batch, heads, -1, value_width), shape)
    return output.transpose(1, 2)


def _emit(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Emit the nodes. Returns output [B, S, H, Dv], present key [B, Hkv, T, D], present value [B, Hkv, T, Dv]."""
    present_key = _write(call.past_key, call.key, call.positions, call.cursors)
    present_value = _write(call.past_value, call.value, call.positions, call.cursors)
    return _attend(call.reading(present_key, present_value)), present_key, present_value


LOWERING = Lowering(
    name="growing",
    rank=9,
    merit="the cache layout of optimum, in standard operators",
    opset=18,
    min_opset=18,
    domains=(),
    cursors=(MASK,),
    emit=_emit,
    write=_write,
    attend=_attend,
    takes_mask=True,
    same_kv_width=False,
    fused="none",
    appends_in_batches=True,
    grows=True,
)
