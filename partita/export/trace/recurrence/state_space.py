"""The scans of Mamba and Mamba-2.

Mamba: each channel has a state with one decay per number.

    S = exp(dt A) S + dt B x;   output = C' S + D x

transformers starts from zeros in every step of several tokens, which would lose earlier prompt chunks; here the scan
starts from the state that the layer read from its cache. Source: Gu and Dao, "Mamba", arXiv 2312.00752.

Mamba-2: a head's state has one decay for all of its numbers, as in linear attention.

    S = exp(dt A) S + dt x B';   output = S C + D x

One-token steps use the scan, too: transformers omits its limit on dt there (`dt_limit`, set by nemotron_h and zamba2),
so that its result depends on the chunks of a prompt. In standard operators a chunk is one matrix product under a mask
of decays. Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
"""

# ruff: noqa: N803 - the arguments have the names that transformers calls them by
from __future__ import annotations

from typing import Any

import torch

from partita.errors import UnsupportedModelError
from partita.export.trace import Form
from partita.export.trace.hooks import active_plug
from partita.export.trace.recurrence import Recurrence, linear_attention

CHUNK = 64


def selective_scan(
    form: Form,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **keywords: Any,
) -> Any:
    """Returns [B, H, S], and the state [B, H, N] if requested. One node with one head per channel, or token by token.

    hidden_states, dt, z [B, H, S], A [H, N], B, C [B, N, S], D, delta_bias [H].
    """
    step = dt.to(torch.float32)
    if delta_bias is not None:
        step = step + delta_bias.to(torch.float32)[..., None]
    if delta_softplus:
        step = torch.nn.functional.softplus(step)
    if form == "contrib":
        step = step.transpose(1, 2)
        tokens = hidden_states.to(torch.float32).transpose(1, 2)
        decay = A.to(torch.float32) * step[..., None]
        ones = torch.ones(tokens.shape[-1], 1, dtype=torch.float32)
        # Keys and queries are equal for all channels.
        key, query = (tensor.to(torch.float32).transpose(1, 2)[:, :, None] * ones for tensor in (B, C))
        state = _channel_states(hidden_states, A)[..., None]
        output, final = linear_attention(query, key, (tokens * step)[..., None], state, decay, None, 1.0)
        output, state = output.squeeze(-1).transpose(1, 2).to(hidden_states.dtype), final.squeeze(-1)
    else:
        step = step[..., None]
        decay = torch.exp(A.to(torch.float32)[None, :, None] * step)
        new = step * B.to(torch.float32).transpose(1, 2)[:, None] * hidden_states.to(torch.float32)[..., None]
        state, outputs = _channel_states(hidden_states, A), []
        for index in range(hidden_states.shape[2]):
            state = decay[:, :, index] * state + new[:, :, index]
            outputs.append(state @ C[:, :, index].to(torch.float32)[..., None])
        output = torch.cat(outputs, dim=-1).to(hidden_states.dtype)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * torch.nn.functional.silu(z)
    return (output, state.to(hidden_states.dtype)) if return_last_state else output


def _channel_states(hidden_states: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """The initial state [B, H, N] in float32; zeros without one."""
    state = active_plug().last_state
    if state is None:
        return torch.zeros(hidden_states.shape[0], *A.shape, dtype=torch.float32)
    if state.ndim != A.ndim + 1:
        raise UnsupportedModelError(
            "the model scans the heads of a selective state space separately (several scans share one "
            "state), which is not supported"
        )
    return state.to(torch.float32)


def chunk_scan(
    form: Form,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **keywords: Any,
) -> Any:
    """Returns [B, S, H, P], and the state [B, H, P, N] if requested, in float32. One node, or products by chunk.

    hidden_states [B, S, H, P], dt [B, S, H], A, D, dt_bias [H], B, C [B, S, G, N] with H / G heads each.
    """
    tokens, step, key, query = _prepared(hidden_states, dt, B, C, dt_bias, dt_limit, softplus=dt_softplus)
    state, decay = _head_states(initial_states, tokens, key), A.to(torch.float32) * step
    if form == "contrib":
        value = tokens * step[..., None]
        output, final = linear_attention(query, key, value, state.transpose(2, 3), decay, None, 1.0)
        return _output(output, final.transpose(2, 3), tokens, D, with_state=return_final_states)
    outputs = []
    by_head = [tensor.transpose(1, 2) for tensor in (tokens * step[..., None], key, query)]
    decay = decay.transpose(1, 2)
    for begin in range(0, hidden_states.shape[1], CHUNK):
        parts = [tensor[:, :, begin : begin + CHUNK] for tensor in by_head]
        output, state = chunk(parts[0], parts[1], parts[2], decay[:, :, begin : begin + CHUNK], state)
        outputs.append(output)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return _output(output.transpose(1, 2), state, tokens, D, with_state=return_final_states)


def _prepared(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    limit: tuple[float, float],
    *,
    softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, time steps [B, S, H], B and C repeated for each head that shares them; all in float32."""
    step = dt.to(torch.float32) if bias is None else dt.to(torch.float32) + bias.to(torch.float32)
    if softplus:
        step = torch.nn.functional.softplus(step)
    if limit != (0.0, float("inf")) or not softplus:
        step = torch.clamp(step, min=limit[0], max=limit[1])
    repeats = hidden_states.shape[2] // B.shape[2]
    key, query = (tensor.to(torch.float32).repeat_interleave(repeats, dim=2) for tensor in (B, C))
    return hidden_states.to(torch.float32), step, key, query


def _head_states(state: torch.Tensor | None, tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The initial state [B, H, P, N] in float32; zeros without one."""
    if state is None:
        state = active_plug().last_state
    if state is None:
        return tokens.new_zeros(tokens.shape[0], *tokens.shape[2:], key.shape[-1])
    return state.to(torch.float32)


def chunk(
    new: torch.Tensor, key: torch.Tensor, query: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, C, P] and state [B, H, P, N]; new [B, H, C, P], key, query [B, H, C, N], decay [B, H, C]."""
    length = new.shape[2]
    if length == 1:
        state = decay.exp()[..., None] * state + new.transpose(2, 3) * key
        return query @ state.transpose(2, 3), state
    total = decay.cumsum(dim=2)[..., None]
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    pairs = (total - total.transpose(2, 3)).masked_fill(~lower, float("-inf")).exp()
    output = (query * total.exp()) @ state.transpose(2, 3) + (query @ key.transpose(2, 3) * pairs) @ new
    left = (total[:, :, -1:] - total).exp()
    return output, state * total[:, :, -1:].exp() + new.transpose(2, 3) @ (key * left)


def _output(
    output: torch.Tensor, state: torch.Tensor, tokens: torch.Tensor, D: torch.Tensor | None, *, with_state: bool
) -> Any:
    """The output with the bypass D x; contiguous, because models take views of it."""
    if D is not None:
        output = output + tokens * D.to(torch.float32)[..., None]
    output = output.contiguous()
    return (output, state) if with_state else output


RECURRENCES = {
    "mamba_selective_scan": Recurrence(selective_scan),
    "mamba2_chunk_scan": Recurrence(chunk_scan, reads_state=True),
}
