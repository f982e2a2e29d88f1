"""Experts in operators that every compiler supports (opset 18, at most three dimensions).

All experts at once, for prompts. The second product sums over experts, so there is no output per expert:

    x [T, H] ─ Gemm(up [E*F, H]) ─ [T, E, F] ─ activation ─ [T, E, I] ─ Mul(routing [T, E, 1]) ─┐
    y [T, H] ──────────────────────────────────────── MatMul(down [E*I, H]) ─ Reshape [T, E*I] ─┘

Only the chosen experts, for a small fixed number of tokens (the decode graph of a pair):

    up [E, F, H] ─ Gather(index [T*K]) ─ MatMul(x) ─ activation ─ MatMul(Gather(down [E, I, H])) ─ Mul ─ ReduceSum ─ y

Both read the same bytes of both weights, so the graphs of a pair share them. Measured on two cores of a Xeon with 64
experts of 512 x 256, 8 chosen: one token takes 0.9 ms gathered and 5.3 ms over all; 512 tokens take 650 ms and 10.9 GB
gathered and 105 ms and 0.27 GB over all.

`Experts` reads the attributes that transformers' `use_experts_implementation` sets on a module (documented by
`batched_mm_experts_forward` in transformers, integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.export.trace import product, reshape

if TYPE_CHECKING:
    import torch

GATHER_SHARE = 2
"""Experts are gathered when at most 1 / GATHER_SHARE of their weights is read, because gathering copies them."""
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
    """The weight of every expert for every token: [T, E]; a router may choose an expert twice, or none."""
    import torch

    numbers = torch.arange(call.experts.count + 1, dtype=torch.int32)
    chosen = numbers[call.index][:, :, None] == numbers[:-1]
    nothing = torch.zeros((), dtype=call.weights.dtype)
    return torch.where(chosen, call.weights[:, :, None], nothing).sum(dim=1)


def existing(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and weights of the chosen experts, [T, K]: expert 0 with weight 0 instead of no expert."""
    import torch

    count = call.experts.count
    numbers = torch.cat([torch.arange(count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)])
    share = torch.cat([torch.ones(count, dtype=call.weights.dtype), torch.zeros(1, dtype=call.weights.dtype)])
    return numbers[call.index], call.weights * share[call.index]


def emit(call: Call) -> tuple[str, torch.Tensor]:
    """Emit the nodes. Returns a description and the output [T, H]."""
    chosen = call.index.shape[1]
    if call.tokens is not None and GATHER_SHARE * call.tokens * chosen <= call.experts.count:
        return "standard operators over the selected experts", _chosen_experts(call, call.tokens)
    if call.experts.after is not None:
        return "standard operators over all experts, one output each", _separate(call)
    return "standard operators over all experts", _together(call)


def _together(call: Call) -> torch.Tensor:
    """All experts, summed by the second product."""
    experts = call.experts
    count, inner, hidden = experts.down.shape
    rows = call.hidden.shape[0]
    weights = routing(call).to(call.hidden.dtype)
    active = _inner_activations(call) * weights[:, :, None]
    flat = reshape(active, (-1, count * inner), (rows, count * inner))
    output = product(flat, experts.down.reshape(count * inner, hidden))
    return output if experts.down_bias is None else output + product(weights, experts.down_bias)


def _separate(call: Call) -> torch.Tensor:
    """All experts with an output [E, T, H] each, for models that post-process it."""
    experts = call.experts
    assert experts.after is not None
    weights = routing(call).to(call.hidden.dtype)
    output = product(_inner_activations(call).transpose(0, 1), experts.down)
    if experts.down_bias is not None:
        output = output + experts.down_bias[:, None, :]
    return (experts.after(output) * weights.transpose(0, 1)[:, :, None]).sum(dim=0).to(call.hidden.dtype)


def _inner_activations(call: Call) -> torch.Tensor:
    """The inner activations of all experts, [T, E, I]."""
    import torch.onnx.ops as onnx_ops

    experts, rows = call.experts, call.hidden.shape[0]
    count, width, hidden = experts.up.shape
    stacked = experts.up.reshape(count * width, hidden)
    flat = onnx_ops.symbolic(
        "onnx::Gemm",
        (call.hidden, stacked),
        {"transB": 1},
        dtype=call.hidden.dtype,
        shape=(rows, count * width),
        version=13,
    )
    inner = reshape(flat, (-1, count, width), (rows, count, width))
    return experts.activate(inner if experts.up_bias is None else inner + experts.up_bias)


def _chosen_experts(call: Call, tokens: int) -> torch.Tensor:
    """The chosen experts of a fixed number of tokens."""
    experts, chosen = call.experts, call.index.shape[1]
    hidden, pairs = call.hidden.shape[1], tokens * call.index.shape[1]
    index, weights = existing(call)
    index = index.reshape(pairs)
    rows = call.hidden[:, None, :].expand(tokens, chosen, hidden).reshape(pairs, hidden, 1)
    inner = product(experts.up[index], rows).reshape(pairs, experts.up.shape[1])
    if experts.up_bias is not None:
        inner = inner + experts.up_bias[index]
    active = experts.activate(inner).reshape(pairs, 1, experts.down.shape[1])
    output = product(active, experts.down[index]).reshape(pairs, hidden)
    if experts.down_bias is not None:
        output = output + experts.down_bias[index]
    if experts.after is not None:
        output = experts.after(output)
    weighted = output.reshape(tokens, chosen, hidden) * weights[:, :, None]
    return weighted.sum(dim=1).to(call.hidden.dtype)
