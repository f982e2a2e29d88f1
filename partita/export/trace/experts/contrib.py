"""Experts as one `com.microsoft::MoE` node, which computes only the chosen ones.

    x [T, H] ───────────────────────────────────────────┐
    routing [T, E] ─ Div(largest) ─ Log ─ logits ────────┤ MoE(k, normalize_routing_weights) ─ Mul(sum) ─ y [T, H]
    up [E, F, H], up bias, down [E, H, I], down bias ────┘

The operator applies a softmax, selects the k largest and divides them by their sum. With logarithms of the router's
weights as input, it computes these weights over their sum; the sum is multiplied on afterwards. Logarithms are relative
to the largest weight of a token, for precision in float16. An expert that is not chosen gets log(1e-20), and so does
one with a negative weight: routers end in a softmax or sigmoid, and the known answer would show another one.

ONNX Runtime 1.31.1 on its CPU provider: fc3 is not implemented; swiglu only with interleaved gate and up
(swiglu_fusion=1); its alpha, beta and limit, biases, relu, silu, identity and gelu (by tanh) are correct in float32 and
float16. Without normalize_routing_weights a float16 node returns zeros. There is no bfloat16 kernel on the CPU.

Identify the activation of experts by running the model's code on numbers.

A gated activation of the MoE operator is G * sigmoid(alpha * G) * (L + beta), with G = min(gate, limit) and L =
clamp(up, -limit, limit). A few values give the parameters; then the formula is compared with the model's code on random
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from partita.export.trace.experts.standard import Call, Experts, Function, routing

NAME = "MoE operator"
LEAST = 1e-20
"""Smallest weight relative to the largest; smaller ones count as 0."""


def gate_of(call: Call) -> Gate | str:
    """The activation of the node, or the reason why the operator cannot compute these experts."""
    experts = call.experts
    if experts.after is not None:
        return f"{experts.name} post-processes the output of each expert"
    return recognised(experts) or f"the MoE operator does not support the activation of {experts.name}"


def emit(call: Call, gate: Gate) -> torch.Tensor:
    """Emit the nodes. Returns the output [T, H]."""
    import torch.onnx.ops as onnx_ops

    experts = call.experts
    weights = routing(call).to(torch.float32)
    largest = weights.amax(dim=-1, keepdim=True).clamp(min=LEAST)
    logits = torch.log((weights / largest).clamp(min=LEAST)).to(call.hidden.dtype)
    up, up_bias = (_interleave(t, gate) for t in (experts.up, experts.up_bias))
    attributes: dict[str, Any] = {"k": call.index.shape[1], "normalize_routing_weights": 1, **gate.attributes()}
    inputs = (call.hidden, logits, up, up_bias, experts.down.transpose(1, 2), experts.down_bias)
    output = onnx_ops.symbolic(
        "com.microsoft::MoE", inputs, attributes, dtype=call.hidden.dtype, shape=call.hidden.shape, version=1
    )
    return output * weights.sum(dim=-1, keepdim=True).to(call.hidden.dtype)


def _interleave(tensor: torch.Tensor | None, gate: Gate) -> torch.Tensor | None:
    """[E, F, ...] with interleaved gate and up rows g0, u0, g1, u1, ...; a pass folds this into the stored weights."""
    if tensor is None or not gate.halves:
        return tensor
    count, width, *rest = tensor.shape
    return tensor.reshape(count, 2, width // 2, *rest).transpose(1, 2).reshape(count, width, *rest)


SAMPLES, WIDTH = 64, 4
FAR = 1e6
"""Beyond every clamping limit of a model."""
TOLERANCE = 1e-5
"""Some models compute their activation in float32."""


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation of the MoE operator."""

    kind: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    halves: bool = False
    """The gates come first, then the ups; False: they are interleaved, or there is no gate."""

    def attributes(self) -> dict[str, Any]:
        """Attributes of the MoE operator."""
        if self.kind != "swiglu":
            return {"activation_type": self.kind}
        limit = {} if math.isinf(self.limit) else {"swiglu_limit": self.limit}
        values = {"activation_alpha": self.alpha, "activation_beta": self.beta, **limit}
        return {"activation_type": "swiglu", "swiglu_fusion": 1, **values}


PLAIN: dict[str, Function] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}
"""Activations without a gate; the operator's `gelu` is the tanh form."""


def recognised(experts: Experts) -> Gate | None:
    """The activation of `experts` in the operator; None where it has none."""
    # Outside of the trace, which has fake tensors and records operations.
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        if experts.has_gate:
            return _gated(experts.activate, True) or _gated(experts.activate, False)
        numbers = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
        kinds = (kind for kind, function in PLAIN.items() if _matches(experts.activate, function, numbers))
        return next(map(Gate, kinds), None)


def _gated(activate: Function, halves: bool) -> Gate | None:
    """The formula with matching parameters, in one layout; None when no parameters match."""
    try:
        gate = _fitted(activate, halves)
    except (RuntimeError, ValueError, ZeroDivisionError):
        return None
    scale = 10.0 if math.isinf(gate.limit) else 3 * gate.limit
    numbers = torch.randn(SAMPLES, 2 * WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    numbers[: SAMPLES // 2] /= scale
    return gate if _matches(activate, lambda x: _swiglu(x, gate), numbers) else None


def _fitted(activate: Function, halves: bool) -> Gate:
    """The only possible parameters of the formula for `activate`."""

    def at(gate: float, up: float) -> float:
        pair = [[gate] * WIDTH, [up] * WIDTH]
        rows = torch.tensor(pair, dtype=torch.float64)
        return float(activate((rows if halves else rows.T).reshape(1, 2 * WIDTH))[0, 0])

    small = 0.25  # below every limit
    base, slope = at(small, 0.0), (at(small, small) - at(small, 0.0)) / small
    share = slope / small
    alpha, beta = math.log(share / (1 - share)) / small, base / slope
    far, farther = at(small, FAR), at(small, 2 * FAR)
    limit = far / slope - beta if far == farther else math.inf
    alpha, beta, limit = (float(f"{value:.5g}") for value in (alpha, beta, limit))
    return Gate("swiglu", alpha, beta, limit, halves)


def _swiglu(numbers: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The operator's formula on [..., 2*I]."""
    parts = numbers.chunk(2, dim=-1) if gate.halves else (numbers[..., ::2], numbers[..., 1::2])
    g, u = parts[0].clamp(max=gate.limit), parts[1].clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.alpha * g) * (u + gate.beta)


def _matches(left: Function, right: Function, numbers: torch.Tensor) -> bool:
    """Whether two functions match on `numbers`."""
    try:
        wanted, found = left(numbers).double(), right(numbers).double()
    except RuntimeError:
        return False  # it needs weights, or cannot run on a few numbers
    return wanted.shape == found.shape and bool(((wanted - found).abs() <= TOLERANCE * (1 + wanted.abs())).all())
