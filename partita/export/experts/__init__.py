"""Mixture of experts: what Partita registers with transformers, and which form a layer is written in.

transformers hands every call of stacked experts to a function of its `ExpertsInterface`, together with what its router
chose. Ours writes one of two forms, a file each: `contrib`, one MoE operator that computes the chosen experts only, and
`standard`, products over all experts or over gathered ones. Neither copies the weights of experts for every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from partita.errors import UnsupportedModelError
from partita.export.experts import contrib, standard
from partita.export.experts.base import Call, Experts
from partita.export.experts.gates import Gate

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLEMENTATION", "Form", "Forms", "experts_form", "register"]

IMPLEMENTATION = "partita"
"""The name under which our function is registered with transformers."""

Form = Literal["contrib", "standard"]


@dataclass(slots=True)
class Forms:
    """The form that is asked for, and what became of it."""

    wanted: Form
    tokens: int | None
    """B*S when it is fixed, None when it is symbolic."""
    decided: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> list[str]:
        """What was decided, and for how many layers, a line each."""
        return [f"experts of {count} layer{'s' * (count > 1)}: {what}" for what, count in self.decided.items()]


_active: list[Forms] = []


@contextmanager
def experts_form(form: Form, tokens: int | None) -> Iterator[Forms]:
    """Write experts as `form` for the length of the block. `tokens`: B*S, None when it is symbolic."""
    forms = Forms(form, tokens)
    _active.append(forms)
    try:
        yield forms
    finally:
        _active.pop()


def register() -> None:
    """Register our function with transformers; doing it twice does no harm."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


def _forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Registered experts function: hidden states [T, H], chosen experts and their weights [T, K] -> [T, H]."""
    if not _active:
        raise UnsupportedModelError(f"{type(module).__name__} was called outside of a trace")
    forms = _active[-1]
    experts = Experts.of(module)
    width, k = hidden_states.shape[-1], top_k_index.shape[-1]
    rows = hidden_states.reshape(-1, width)
    call = Call(experts, rows, top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k), forms.tokens)
    gate = contrib.gate_of(experts) if forms.wanted == "contrib" else None
    if isinstance(gate, Gate):
        what, output = contrib.NAME, contrib.emit(call, gate)
    else:
        what, output = standard.emit(call)
    forms.decided[what if not gate or isinstance(gate, Gate) else f"{what}, because {gate}"] += 1
    return output.reshape(hidden_states.shape)
