"""Which activation experts have, found out by running the model's own code on numbers, never by a class name.

A gated activation of the MoE operator is G * sigmoid(alpha * G) * (L + beta), with G = min(gate, limit) and
L = clamp(up, -limit, limit). The parameters follow from a few values of such a function, and the whole formula is then
compared with the model's code on random numbers; what differs anywhere is not recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from partita.export.trace.experts.base import Experts, Function

SAMPLES, WIDTH = 64, 4
FAR = 1e6
"""Beyond every limit that a model clamps to."""
TOLERANCE = 1e-5
"""Some models compute their activation in float32."""


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation that the MoE operator has."""

    kind: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    halves: bool = False
    """True when the gates come first and then the ups, False when they are interleaved (or there is no gate)."""

    def attributes(self) -> dict[str, Any]:
        """What the MoE operator is told of the gate, by attribute."""
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
"""Activations without a gate; `gelu` is the operator's, which is the one by tanh."""


def recognised(experts: Experts) -> Gate | None:
    """The activation of `experts` as the operator has it; None when it has none like it."""
    # A trace records what torch does, and has fake tensors and a graph of its own; the numbers here are none of it.
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        tries = (_gated(experts.activate, True), _gated(experts.activate, False)) if experts.gated else _plain(experts)
        return next((gate for gate in tries if gate is not None), None)


def _plain(experts: Experts) -> list[Gate]:
    """The activations without a gate that give the same numbers."""
    numbers = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return [Gate(kind) for kind, function in PLAIN.items() if _same(experts.activate, function, numbers)]


def _gated(activate: Function, halves: bool) -> Gate | None:
    """The formula with the parameters that give the same numbers, in one layout; None when no parameters do."""
    try:
        gate = _fitted(activate, halves)
    except (RuntimeError, ValueError, ZeroDivisionError):
        return None
    scale = 10.0 if math.isinf(gate.limit) else 3 * gate.limit
    numbers = torch.randn(SAMPLES, 2 * WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    numbers[: SAMPLES // 2] /= scale
    return gate if _same(activate, lambda x: _swiglu(x, gate), numbers) else None


def _fitted(activate: Function, halves: bool) -> Gate:
    """The only parameters of the formula that `activate` can have."""

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


def _same(left: Function, right: Function, numbers: torch.Tensor) -> bool:
    """Whether two functions agree on `numbers`."""
    try:
        wanted, found = left(numbers).double(), right(numbers).double()
    except RuntimeError:
        return False  # it needs weights that are not there, or cannot be run on a few numbers
    return wanted.shape == found.shape and bool(((wanted - found).abs() <= TOLERANCE * (1 + wanted.abs())).all())
