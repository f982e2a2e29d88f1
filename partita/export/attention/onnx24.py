"""Attention and cache in standard ONNX: `TensorScatter` writes the cache, `Attention` (opset 24) reads it.

    key ── TensorScatter(past key, write_indices) ── present key ──┐
    value ─ TensorScatter(past value, write_indices) ─ present value┤ Attention(is_causal, nonpad_kv_seqlen) ── output
    query ──────────────────────────────────────────────────────────┘

A sliding window becomes a boolean mask of allowed keys on top of the causal rule. Source: ONNX operator documentation,
TensorScatter-24 and Attention-24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.export.attention.base import AttentionCall, Cursor, Lowering

if TYPE_CHECKING:
    import torch


def window_mask(positions: torch.Tensor, window: int, max_length: int) -> torch.Tensor:
    """True where a key is inside the window of a query: positions [B, S] -> [B, 1, S, N]."""
    import torch

    keys = torch.arange(max_length, dtype=positions.dtype)
    return (keys[None, None, :] > positions[:, :, None] - window)[:, None]


def emit(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Emit the nodes. Returns output [B, S, H, Dv], present key [B, Hkv, N, D], present value [B, Hkv, N, Dv]."""
    import torch.onnx.ops as onnx_ops

    write_start, valid_length = call.cursors
    present_key, present_value = (
        onnx_ops.symbolic(
            "onnx::TensorScatter",
            (past, new, write_start),
            {"axis": 2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=24,
        )
        for past, new in ((call.past_key, call.key), (call.past_value, call.value))
    )
    batch, heads, length, _ = call.query.shape
    mask = None if call.window is None else window_mask(call.positions, call.window, call.past_key.shape[2])
    output = onnx_ops.symbolic(
        "onnx::Attention",
        (call.query, present_key, present_value, mask, None, None, valid_length),
        {"is_causal": 1, "scale": call.scale, **({"softcap": call.softcap} if call.softcap else {})},
        dtype=call.query.dtype,
        shape=(batch, heads, length, call.value.shape[-1]),
        version=24,
    )
    return output.transpose(1, 2), present_key, present_value


LOWERING = Lowering(
    name="onnx24",
    opset=24,
    min_opset=24,
    domains=(),
    cursors=(
        Cursor("write_indices", "write_start", "int64", per_row=True),
        Cursor("nonpad_kv_seqlen", "valid_length", "int64", per_row=True),
    ),
    emit=emit,
    same_kv_width=False,
    appends_in_batches=True,
)
