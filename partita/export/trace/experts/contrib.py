"""Experts as one `com.microsoft::MoE` node, which computes only the chosen ones.

    x [T, H] ───────────────────────────────────────────┐
    routing [T, E] ─ Div(largest) ─ Log ─ logits ────────┤ MoE(k, normalize_routing_weights) ─ Mul(sum) ─ y [T, H]
    up [E, F, H], up bias, down [E, H, I], down bias ────┘

The operator applies a softmax, selects the k largest and divides them by their sum. With logarithms of the router's
weights as input, it computes these weights over their sum; the sum is multiplied on afterwards. Logarithms are relative
to the largest weight of a token, for precision in float16. An expert that is not chosen gets log(1e-20).

ONNX Runtime 1.31.1 on its CPU provider: fc3 is not implemented; swiglu only with interleaved gate and up
(swiglu_fusion=1); its alpha, beta and limit, biases, relu, silu, identity and gelu (by tanh) are correct in float32 and
float16. Without normalize_routing_weights a float16 node returns zeros. There is no bfloat16 kernel on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.export.trace.experts.base import Call, routing
from partita.export.trace.experts.gates import Gate, recognised

if TYPE_CHECKING:
    import torch

    from partita.export.trace.experts.signs import Signs

NAME = "MoE operator"
LEAST = 1e-20
"""Smallest weight relative to the largest; smaller ones count as 0."""


def gate_of(call: Call, signs: Signs) -> Gate | str:
    """The activation of the node, or the reason why the operator cannot compute these experts."""
    experts = call.experts
    if experts.after is not None:
        return f"{experts.name} post-processes the output of each expert"
    if not signs.never_negative(call.weights):
        return f"the router's weights for {experts.name} may be negative"
    return recognised(experts) or f"the MoE operator does not support the activation of {experts.name}"


def emit(call: Call, gate: Gate) -> torch.Tensor:
    """Emit the nodes. Returns the output [T, H]."""
    import torch
    import torch.onnx.ops as onnx_ops

    experts = call.experts
    weights = routing(call).to(torch.float32)
    largest = weights.amax(dim=-1, keepdim=True).clamp(min=LEAST)
    logits = torch.log((weights / largest).clamp(min=LEAST)).to(call.hidden.dtype)
    up, up_bias = (_taking_turns(t, gate) for t in (experts.up, experts.up_bias))
    attributes: dict[str, Any] = {"k": call.index.shape[1], "normalize_routing_weights": 1, **gate.attributes()}
    inputs = (call.hidden, logits, up, up_bias, experts.down.transpose(1, 2), experts.down_bias)
    output = onnx_ops.symbolic(
        "com.microsoft::MoE", inputs, attributes, dtype=call.hidden.dtype, shape=call.hidden.shape, version=1
    )
    return output * weights.sum(dim=-1, keepdim=True).to(call.hidden.dtype)


def _taking_turns(tensor: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
    """[E, F, ...] with interleaved gate and up rows g0, u0, g1, u1, ...; a pass folds this into the stored weights."""
    if tensor is None or not gate.halves:
        return tensor
    count, width, *rest = tensor.shape
    return tensor.reshape(count, 2, width // 2, *rest).transpose(1, 2).reshape(count, width, *rest)
