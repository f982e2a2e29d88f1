"""Attention and cache as one `com.microsoft::GroupQueryAttention` node.

    query, key, value [B, S, H*D] ──┐
    past key, past value ───────────┤  GroupQueryAttention ── output [B, S, H*D]
    seqlens_k, total_sequence_length┘                      └─ present key, present value (same buffer as past)

Keys and values of different head sizes are padded to the larger one; a sink becomes the head sink. A computed mask
(position bias, chunked mask) would need length `total_sequence_length`, which is not a fixed size: such attention is
written in primitives. `seqlens_k` is, per sequence, the index of the last valid cache row after this step;
`total_sequence_length` is their maximum plus one, a CPU input. A window cache uses `sliding_window_cache`: both still
count all tokens, and the buffer has exactly `local_window_size` rows, as the CUDA provider requires.

Source: ONNX Runtime ContribOperators.md, GroupQueryAttention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.export.trace import pad_last_axis
from partita.export.trace.attention import AttentionCall, Cursor, Lowering, primitives

if TYPE_CHECKING:
    import torch


def emit(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Emit the node. Returns output [B, S, H, Dv], present key and value [B, Hkv, N, D]."""
    import torch.onnx.ops as onnx_ops

    new = call.reading
    batch, heads, length, _ = new.query.shape
    key_width, value_width = call.past_key.shape[-1], call.past_value.shape[-1]
    flat = [
        pad_last_axis(tensor, width).transpose(1, 2).reshape(batch, length, -1)
        for tensor, width in ((new.query, key_width), (new.keys, key_width), (new.values, value_width))
    ]
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": new.keys.shape[1],
        "scale": new.scale,
    }
    if new.softcap:
        attributes["softcap"] = new.softcap
    if new.window is not None:
        attributes["local_window_size"] = new.window
    if call.rolls:
        attributes["sliding_window_cache"] = 1
    inputs: list[torch.Tensor | None] = [*flat, call.past_key, call.past_value, *new.cursors]
    if new.sink is not None:
        inputs += [None, None, None, None, new.sink]  # no cosines, sines, positions and bias
    output, present_key, present_value = onnx_ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attributes,
        dtypes=(new.query.dtype,) * 3,
        shapes=((batch, length, heads * value_width), call.past_key.shape, call.past_value.shape),
        version=1,
    )
    output = output.reshape(batch, length, heads, value_width)
    return output[..., : new.values.shape[-1]], present_key, present_value


LOWERING = Lowering(
    name="gqa",
    opset=21,
    min_opset=18,
    domains=(("com.microsoft", 1),),
    cursors=(
        Cursor("seqlens_k", "last_index", "int32", per_row=True),
        Cursor("total_sequence_length", "total_length", "int32", per_row=False),
    ),
    write=primitives.write,
    attend=primitives.attend,
    takes_mask=False,
    same_kv_width=True,
    fused="contrib",
    # ONNX Runtime 1.31.1: "batch_size must be 1 when sequence_length > 1 and past context is given"
    appends_in_batches=False,
    rolls=True,
    fused_call=emit,
)
