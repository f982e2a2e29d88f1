"""Emit one `com.microsoft::LinearAttention` node: a recurrence over any number of tokens.

    gated        S = exp(decay) S + k v';                            output = scale q' S
    gated_delta  S = exp(decay) S + beta k (v - S' k)', S decayed;   output = scale q' S

Source: ONNX Runtime ContribOperators.md, LinearAttention.
"""

from __future__ import annotations

import torch


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [B, S, H, Dv] and the new state.

    query, key [B, S, H, Dk], value [B, S, H, Dv], state [B, H, Dk, Dv], decay [B, S, H] or [B, S, H, Dk], beta [B, S,
    H].
    """
    import torch.onnx.ops as onnx_ops

    batch, length, heads, value_width = value.shape
    packed = [tensor.reshape(batch, length, -1) for tensor in (query, key, value)]
    inputs: list[torch.Tensor] = [*packed, state, decay.reshape(batch, length, -1)]
    if beta is not None:
        inputs.append(beta)
    output, present = onnx_ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        inputs,
        {
            "q_num_heads": heads,
            "kv_num_heads": heads,
            "update_rule": "gated" if beta is None else "gated_delta",
            "scale": scale,
        },
        dtypes=(value.dtype, state.dtype),
        shapes=((batch, length, heads * value_width), state.shape),
        version=1,
    )
    return output.reshape(batch, length, heads, value_width), present
