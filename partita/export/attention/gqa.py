"""Attention and cache as one `com.microsoft::GroupQueryAttention` node.

    query, key, value [B, S, H*D] ──┐
    past key, past value ───────────┤  GroupQueryAttention ── output [B, S, H*D]
    seqlens_k, total_sequence_length┘                      └─ present key, present value (same buffer as past)

`seqlens_k` is, per row, the index of the last cache row that is valid after this step; `total_sequence_length` is the
largest of them plus one, a CPU input. Source: ONNX Runtime ContribOperators.md, GroupQueryAttention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.export.attention.base import AttentionCall, Cursor, Lowering

if TYPE_CHECKING:
    import torch


def emit(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Emit the node. Returns output [B, S, H, D], present key and value [B, Hkv, N, D]."""
    import torch.onnx.ops as onnx_ops

    batch, heads, length, width = call.query.shape
    flat = [t.transpose(1, 2).reshape(batch, length, -1) for t in (call.query, call.key, call.value)]
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": call.key.shape[1],
        "scale": call.scale,
    }
    if call.softcap:
        attributes["softcap"] = call.softcap
    if call.window is not None:
        attributes["local_window_size"] = call.window
    output, present_key, present_value = onnx_ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        (*flat, call.past_key, call.past_value, *call.cursors),
        attributes,
        dtypes=(call.query.dtype,) * 3,
        shapes=((batch, length, heads * width), call.past_key.shape, call.past_value.shape),
        version=1,
    )
    return output.reshape(batch, length, heads, width), present_key, present_value


LOWERING = Lowering(
    name="gqa",
    opset=21,
    min_opset=18,
    domains=(("com.microsoft", 1),),
    cursors=(
        Cursor("seqlens_k", "last_index", "int32", per_row=True),
        Cursor("total_sequence_length", "total_length", "int32", per_row=False),
    ),
    emit=emit,
    same_kv_width=True,
    # "batch_size must be 1 when sequence_length > 1 and past context is given", says ONNX Runtime 1.31.1.
    appends_in_batches=False,
)
