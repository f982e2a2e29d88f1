"""The selective scan of Mamba: each channel has a state with one decay per number.

    S = exp(dt A) S + dt B x;   output = C' S + D x

transformers starts from zeros in every step of several tokens, which would lose earlier prompt chunks; here the scan
starts from the state that the layer read from its cache. Source: Gu and Dao, "Mamba", arXiv 2312.00752.
"""

# ruff: noqa: N803 - the arguments have the names that transformers calls them by
from __future__ import annotations

from typing import Any

import torch

from partita.errors import UnsupportedModelError
from partita.export.trace import Form
from partita.export.trace.hooks import last_state
from partita.export.trace.recurrence import Recurrence, linear_attention


def run(
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
        state = _initial(hidden_states, A)[..., None]
        output, final = linear_attention(query, key, (tokens * step)[..., None], state, decay, None, 1.0)
        output, state = output.squeeze(-1).transpose(1, 2).to(hidden_states.dtype), final.squeeze(-1)
    else:
        step = step[..., None]
        decay = torch.exp(A.to(torch.float32)[None, :, None] * step)
        new = step * B.to(torch.float32).transpose(1, 2)[:, None] * hidden_states.to(torch.float32)[..., None]
        state, outputs = _initial(hidden_states, A), []
        for index in range(hidden_states.shape[2]):
            state = decay[:, :, index] * state + new[:, :, index]
            outputs.append(state @ C[:, :, index].to(torch.float32)[..., None])
        output = torch.cat(outputs, dim=-1).to(hidden_states.dtype)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * torch.nn.functional.silu(z)
    return (output, state.to(hidden_states.dtype)) if return_last_state else output


def _initial(hidden_states: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """The initial state [B, H, N] in float32; zeros without one."""
    state = last_state()
    if state is None:
        return torch.zeros(hidden_states.shape[0], *A.shape, dtype=torch.float32)
    if state.ndim != A.ndim + 1:
        raise UnsupportedModelError(
            "the model scans the heads of a selective state space separately (several scans share one "
            "state), which is not supported"
        )
    return state.to(torch.float32)


RECURRENCE = Recurrence(functions=("mamba_selective_scan",), run=run)
