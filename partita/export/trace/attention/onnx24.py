"""Attention and cache in standard ONNX: `TensorScatter` writes the cache, `Attention` (opset 24) reads it.

    key ── TensorScatter(past key, write_indices) ── present key ──┐
    value ─ TensorScatter(past value, write_indices) ─ present value┤ Attention(is_causal, nonpad_kv_seqlen) ── output
    query ──────────────────────────────────────────────────────────┘

A sliding window becomes a boolean mask of visible keys in addition to the causal rule; a computed mask replaces both.

Source: ONNX operator documentation, TensorScatter-24 and Attention-24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.export.trace.attention import Cursor, Lowering, Reading, primitives

if TYPE_CHECKING:
    import torch


def _window_mask(positions: torch.Tensor, window: int, max_length: int) -> torch.Tensor:
    """Whether a key is inside the window of a query: positions [B, S] -> [B, 1, S, N]."""
    import torch

    keys = torch.arange(max_length, dtype=positions.dtype)
    return (keys[None, None, :] > positions[:, :, None] - window)[:, None]


def write(
    past: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, cursors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """past [B, Hkv, N, D] with new [B, Hkv, S, D] written after the valid rows of each sequence."""
    import torch.onnx.ops as onnx_ops

    return onnx_ops.symbolic(
        "onnx::TensorScatter",
        (past, new, cursors[0]),
        {"axis": 2, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=24,
    )


def _attend(reading: Reading) -> torch.Tensor:
    """Attention of [B, H, S, D] over all rows of the cache; returns [B, S, H, Dv]."""
    import torch.onnx.ops as onnx_ops

    if reading.sink is not None:
        return primitives.attend(reading)
    batch, heads, length, _ = reading.query.shape
    attributes: dict[str, Any] = {"scale": reading.scale, "is_causal": int(reading.mask is None)}
    if reading.softcap:
        attributes["softcap"] = reading.softcap
    mask, valid = reading.mask, None if reading.mask is not None else reading.cursors[1]
    if mask is None and reading.window is not None:
        mask = _window_mask(reading.positions, reading.window, reading.keys.shape[2])
    output = onnx_ops.symbolic(
        "onnx::Attention",
        (reading.query, reading.keys, reading.values, mask, None, None, valid),
        attributes,
        dtype=reading.query.dtype,
        shape=(batch, heads, length, reading.values.shape[-1]),
        version=24,
    )
    return output.transpose(1, 2)


LOWERING = Lowering(
    name="onnx24",
    opset=24,
    min_opset=24,
    cursors=(
        Cursor("write_indices", "write_start", "int64", per_row=True),
        Cursor("nonpad_kv_seqlen", "valid_length", "int64", per_row=True),
    ),
    write=write,
    attend=_attend,
    fused="standard",
)
