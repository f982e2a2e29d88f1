"""The gated delta rule (Gated DeltaNet, Kimi Delta Attention).

    S = exp(g) S;   S = S + beta k (v - S' k)';   output = q' S / sqrt(Dk)

`g` is one number per head, or one per head and key dimension. Standard operators solve the tokens of a chunk at once
(the UT transform of Yang et al., "Gated Delta Networks", arXiv 2412.06464): a unit lower triangular system, inverted by
halves in log2(chunk) steps.
"""

from __future__ import annotations

from typing import Any

import torch

from partita.export.trace import Form
from partita.export.trace.recurrence import Recurrence, linear_attention

CHUNK = 64
NORM_EPSILON = 1e-6
"""Epsilon of the norm of queries and keys, as in transformers (`l2norm` in its modelling code)."""


def run(
    form: Form,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = CHUNK,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns [B, S, H, Dv] and the state [B, H, Dk, Dv] in float32. One node, or matrix products chunk by chunk.

    query, key [B, S, Hk, Dk], value [B, S, H, Dv], g [B, S, H] or [B, S, H, Dk], beta [B, S, H].
    """
    heads, length, dtype = value.shape[2], value.shape[1], query.dtype
    query, key, value, g, beta = _prepared(query, key, value, g, beta, norm=use_qk_l2norm_in_kernel)
    scale = key.shape[-1] ** -0.5
    if initial_state is None:
        state = key.new_zeros(key.shape[0], heads, key.shape[-1], value.shape[-1])
    else:
        state = initial_state.to(torch.float32)
    if form == "contrib":
        output, state = linear_attention(query, key, value, state, g, beta, scale)
        return output.to(dtype), state if output_final_state else None
    query = query * scale
    if g.ndim == 3:
        g = g[..., None]
    outputs = []
    for begin in range(0, length, CHUNK):
        parts = [tensor[:, begin : begin + CHUNK].transpose(1, 2) for tensor in (query, key, value, g, beta[..., None])]
        output, state = chunk(parts[0], parts[1], parts[2], parts[3], parts[4], state)
        outputs.append(output)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output.transpose(1, 2).to(dtype), state if output_final_state else None


def _prepared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, norm: bool
) -> tuple[torch.Tensor, ...]:
    """All in float32; queries and keys normalised if `norm`, and repeated for each value head that shares them."""
    query, key, value, g, beta = (tensor.to(torch.float32) for tensor in (query, key, value, g, beta))
    if norm:
        query, key = _normed(query), _normed(key)
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
    return query, key, value, g, beta


def _normed(tensor: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last axis."""
    return tensor * torch.rsqrt((tensor * tensor).sum(dim=-1, keepdim=True) + NORM_EPSILON)


def chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, C, Dv] and state after C tokens; g [B, H, C, 1 or Dk], beta [B, H, C, 1]."""
    length = query.shape[2]
    decay = g.cumsum(dim=2)
    since = decay.exp()
    left = decay[:, :, -1:] - decay
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    if g.shape[-1] == 1:
        pairs = (decay - decay.transpose(2, 3)).masked_fill(~lower, float("-inf")).exp()
        system = (key * beta) @ key.transpose(2, 3) * pairs
        scores = query @ key.transpose(2, 3) * pairs
    else:
        # One factor per key dimension: it stays inside the sum.
        pairs = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(~lower[..., None], float("-inf")).exp()
        pairs = pairs * key.unsqueeze(2)
        system = ((key * beta).unsqueeze(3) * pairs).sum(dim=-1)
        scores = (query.unsqueeze(3) * pairs).sum(dim=-1)
    inverse = invert_triangular(system)
    corrected = inverse @ (value * beta) - inverse @ (key * beta * since) @ state
    output = (query * since) @ state + scores @ corrected
    final = state * since[:, :, -1:].transpose(2, 3) + (key * left.exp()).transpose(2, 3) @ corrected
    return output, final


def invert_triangular(system: torch.Tensor) -> torch.Tensor:
    """Inverse of the unit lower triangular matrices [..., C, C] whose part below the diagonal is that of `system`.

    Computed by halves for all blocks of a size: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']]. There is
    no division, and the precision is that of forward substitution by blocks.
    """
    size = system.shape[-1]
    inverse = torch.eye(size, dtype=system.dtype)
    rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
    half = 1
    while half < size:
        corners = (rows // (2 * half) == columns // (2 * half)) & (rows // half > columns // half)
        inverse = inverse - inverse @ (system * corners.to(system.dtype)) @ inverse
        half *= 2
    return inverse


RECURRENCES = dict.fromkeys(("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"), Recurrence(run))
