"""Shared parts of the expert forms: the experts of a layer, a call of them, and its routing as a matrix.

`Experts` reads the attributes that transformers' `use_experts_implementation` sets on a module (documented by
`batched_mm_experts_forward` in transformers, integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.export.trace.operators import look_up_rows

if TYPE_CHECKING:
    import torch

Function = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, E of them: hidden size H, inner size I, F = 2*I with a gate and I without."""

    name: str
    up: torch.Tensor
    """[E, F, H]: gate and up projections, concatenated or interleaved, as `activate` expects."""
    down: torch.Tensor
    """[E, I, H]."""
    up_bias: torch.Tensor | None
    """[E, F]."""
    down_bias: torch.Tensor | None
    """[E, H]."""
    has_gate: bool
    activate: Function
    """[..., F] -> [..., I], the model's own code."""
    after: Function | None
    """Post-processing of the output [..., H] of each expert before weighting."""

    @classmethod
    def of(cls, module: Any) -> Experts:
        """The experts of a transformers module, in one layout."""
        prefix = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = getattr(module, prefix), module.down_proj
        biases = (getattr(module, f"{prefix}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
        return cls(
            name=type(module).__name__,
            up=up.transpose(1, 2) if module.is_transposed else up,
            down=down if module.is_transposed else down.transpose(1, 2),
            up_bias=biases[0],
            down_bias=biases[1],
            has_gate=module.has_gate,
            activate=module._apply_gate if module.has_gate else module.act_fn,
            after=module.post_expert_norm if module.has_post_expert_norm else None,
        )

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return self.up.shape[0]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: hidden [T, H], chosen experts `index` [T, K] and their `weights` [T, K].

    An index of E means no expert. Weights need not add up to 1. The index is int64, as ONNX's TopK returns, for which
    GPU providers lack kernels (WebGPU: Cast, Reshape, Equal). Therefore it is only used as a Gather index, also to look
    up its own value as int32.
    """

    experts: Experts
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    tokens: int | None
    """T when it is fixed."""


def routing(call: Call) -> torch.Tensor:
    """The weight of every expert for every token: [T, E], 0 for experts that are not chosen.

    Computed by comparison and sum: a router may choose an expert twice for a token, or one that does not exist.
    """
    import torch

    numbers = torch.arange(call.experts.count + 1, dtype=torch.int32)
    chosen = look_up_rows(numbers, call.index)[:, :, None] == numbers[:-1]
    nothing = torch.zeros((), dtype=call.weights.dtype)
    return torch.where(chosen, call.weights[:, :, None], nothing).sum(dim=1)


def existing(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and weights of the chosen experts, [T, K]: expert 0 with weight 0 instead of no expert."""
    import torch

    count = call.experts.count
    numbers = torch.cat([torch.arange(count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)])
    share = torch.cat([torch.ones(count, dtype=call.weights.dtype), torch.zeros(1, dtype=call.weights.dtype)])
    return look_up_rows(numbers, call.index), call.weights * look_up_rows(share, call.index)
