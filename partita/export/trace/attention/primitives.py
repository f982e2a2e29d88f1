"""Attention and cache in operators that every compiler supports: MatMul, Softmax, Where, and a write by position.

    key ── write at positions (past key) ── present key ────────────────┐
    value ─ write at positions (past value) ─ present value ────┐       │
    query · scale ── MatMul(present key transposed) ── Where(allowed, ·, lowest) ── Softmax ── MatMul ── output

The write is a ScatterElements, which providers run in place when past and present share a buffer; a Where over the
whole cache is not valid in place on WebGPU. Positions are the only cursor: a key is visible when it is not after its
query, so later rows are never visible. Tensors have at most four dimensions, operators are from opset 18 or older.

`GROWS` is the same over a growing cache, in optimum's layout, so that its ORTModelForCausalLM loads it: present is
Concat(past, new), with P and P + S rows from P = 0, so every step copies the whole cache. The mask [B, T] has length
T = P + S; an entry of 0 hides left padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from partita.export.trace import product, reshape
from partita.export.trace.attention import GROWING, Cursor, Lowering, Reading

if TYPE_CHECKING:
    import torch

LOWEST = -60000.0
"""Score of an invisible key: representable in float16, and its softmax is 0."""


def write(
    past: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, cursors: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """past [B, Hkv, N, D] with new [B, Hkv, S, D] written at positions [B, S] of the third axis."""
    import torch
    import torch.onnx.ops as onnx_ops

    # a product with ones, because Expand needs the shape of a symbolic size
    index = positions[:, None, :, None] * torch.ones(1, new.shape[1], 1, new.shape[3], dtype=positions.dtype)
    return onnx_ops.symbolic(
        "onnx::ScatterElements", (past, index, new), {"axis": 2}, dtype=past.dtype, shape=past.shape, version=16
    )


def attention_mask(positions: torch.Tensor, window: int | None, max_length: int) -> torch.Tensor:
    """Whether a query may see a key: positions [B, S] -> [B, 1, S, N]."""
    import torch

    keys = torch.arange(max_length, dtype=positions.dtype)[None, None, None, :]
    queries = positions[:, None, :, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend(reading: Reading, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of [B, H, S, D] over all rows: [B, S, H, Dv]. `padding` [B, N]: 0 for rows never visible."""
    import torch

    batch, heads, length, width = reading.query.shape
    kv_heads, total, value_width = reading.keys.shape[1], reading.keys.shape[2], reading.values.shape[-1]
    last = total if padding is None else 0  # 0: as in the input
    # Query heads of one KV head are rows of one product, so that keys and values are not repeated per query head.
    rows = heads // kv_heads * length
    query = reshape(reading.query * reading.scale, (batch, kv_heads, -1, width), (batch, kv_heads, rows, width))
    scores = product(query, reading.keys.transpose(2, 3))
    scores = reshape(scores, (batch, heads, -1, last), (batch, heads, length, total))
    if reading.softcap:
        scores = torch.tanh(scores / reading.softcap) * reading.softcap
    seen = None if padding is None else (padding != 0)[:, None, None, :]
    if reading.mask is not None:
        scores = scores + reading.mask
    else:
        allowed = attention_mask(reading.positions, reading.window, total)
        seen = allowed if seen is None else seen & allowed
    if seen is not None:
        scores = torch.where(seen, scores, torch.full((), LOWEST, dtype=scores.dtype))
    weights = with_sink(scores, reading.sink) if reading.sink is not None else torch.softmax(scores, dim=-1)
    weights = reshape(weights, (batch, kv_heads, -1, last), (batch, kv_heads, rows, total))
    shape = (batch, heads, length, value_width)
    output = reshape(product(weights, reading.values), (batch, heads, -1, value_width), shape)
    return output.transpose(1, 2)


def with_sink(scores: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Softmax of [B, H, S, N] with one more key of score `sink` [H]."""
    import torch

    column = sink.to(scores.dtype).reshape(1, -1, 1, 1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), column)
    weights = torch.exp(scores - highest)
    return weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(column - highest))


LOWERING = Lowering(
    name="primitives",
    opset=18,
    min_opset=18,
    cursors=(),
    write=write,
    attend=attend,
    fused="none",
)


def _append(
    past: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, cursors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """past [B, Hkv, P, D] followed by new [B, Hkv, S, D]."""
    import torch.onnx.ops as onnx_ops

    # ONNX's operator, because the trace does not know that T, the length of the mask, is P + S
    shape = (*past.shape[:2], cursors[0].shape[1], past.shape[3])
    return onnx_ops.symbolic("onnx::Concat", (past, new), {"axis": 2}, dtype=past.dtype, shape=shape, version=13)


GROWS = replace(
    LOWERING,
    name=GROWING,
    cursors=(Cursor("attention_mask", "mask", "int64", per_row=True, per_key=True),),
    write=_append,
    attend=lambda reading: attend(reading, reading.cursors[0]),
    grows=True,
)
