"""Mixture of experts: the function registered with transformers, and the choice of a form.

transformers passes every call of stacked experts, with the router's choice, to a function of its `ExpertsInterface`.
There are two forms: `contrib`, one MoE operator that computes only the chosen experts, and `standard`, products over
all experts or over gathered ones. Neither copies expert weights per token.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partita.errors import UnsupportedModelError
from partita.export.trace.experts import contrib, standard
from partita.export.trace.experts.contrib import Gate
from partita.export.trace.experts.standard import Call, Experts

if TYPE_CHECKING:
    import torch

    from partita.export.trace import Form

__all__ = ["IMPLEMENTATION", "Forms", "experts_form", "refuse_loops", "register"]

IMPLEMENTATION = "partita"
"""The name of the function registered with transformers."""


@dataclass(slots=True)
class Forms:
    """The requested form, and the forms that were used."""

    requested: Form
    tokens: int | None
    """B*S when it is fixed, None when it is symbolic."""
    chosen: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> list[str]:
        """The forms used, with their number of layers, one line each."""
        return [f"experts of {count} layer{'s' * (count > 1)}: {what}" for what, count in self.chosen.items()]


_active: list[Forms] = []


@contextmanager
def experts_form(form: Form, tokens: int | None) -> Iterator[Forms]:
    """Write experts as `form` in the block. `tokens`: B*S, None: symbolic."""
    forms = Forms(form, tokens)
    _active.append(forms)
    try:
        yield forms
    finally:
        _active.pop()


def register() -> None:
    """Register the function with transformers; idempotent."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


STACKED = "is_concatenated"
"""An attribute that transformers' `use_experts_implementation` sets on modules."""
LOOPS = frozenset({"top_k_index", "expert_size"})
"""Parameters of a forward that loops over the chosen experts."""


def refuse_loops(model: torch.nn.Module) -> None:
    """Raise UnsupportedModelError for experts that loop over selected experts outside the interface."""
    for name, module in model.named_modules():
        loops = LOOPS.intersection(inspect.signature(module.forward).parameters)
        if loops and not hasattr(module, STACKED):
            raise UnsupportedModelError(
                f"{name}: {type(module).__name__} loops over the selected experts outside transformers' "
                "experts interface, which is not supported"
            )


def _forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The registered function: hidden states [T, H], chosen experts and their weights [T, K] -> [T, H]."""
    if not _active:
        raise UnsupportedModelError(f"{type(module).__name__} was called outside of a trace")
    forms = _active[-1]
    experts = Experts.of(module)
    call = Call(experts, _in_rows(hidden_states), _in_rows(top_k_index), _in_rows(top_k_weights), forms.tokens)
    gate = contrib.gate_of(call) if forms.requested == "contrib" else None
    if isinstance(gate, Gate):
        what, output = contrib.NAME, contrib.emit(call, gate)
    else:
        what, output = standard.emit(call)
    forms.chosen[what if not gate or isinstance(gate, Gate) else f"{what}, because {gate}"] += 1
    return output if hidden_states.dim() == 2 else output.reshape(hidden_states.shape)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to one row per token, if necessary."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
