"""Mixture of experts: what Partita registers with transformers, and which form a layer is written in.

transformers hands every call of stacked experts to a function of its `ExpertsInterface`, together with what its router
chose. Ours writes one of two forms, a file each: `contrib`, one MoE operator that computes the chosen experts only, and
`standard`, products over all experts or over gathered ones. Neither copies the weights of experts for every token.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.errors import UnsupportedModelError
from partita.export.trace.experts import contrib, standard
from partita.export.trace.experts.base import Call, Experts
from partita.export.trace.experts.gates import Gate

if TYPE_CHECKING:
    import torch

    from partita.export.trace.experts.signs import Signs
    from partita.export.trace.operators import Form

__all__ = ["IMPLEMENTATION", "Forms", "experts_form", "has_stacked", "refuse_loops", "register"]

IMPLEMENTATION = "partita"
"""The name under which our function is registered with transformers."""


@dataclass(slots=True)
class Forms:
    """The form that is asked for, and what became of it."""

    wanted: Form
    tokens: int | None
    """B*S when it is fixed, None when it is symbolic."""
    signs: Signs
    decided: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> list[str]:
        """What was decided, and for how many layers, a line each."""
        return [f"experts of {count} layer{'s' * (count > 1)}: {what}" for what, count in self.decided.items()]


_active: list[Forms] = []


@contextmanager
def experts_form(form: Form, tokens: int | None, *, stacked: bool = True) -> Iterator[Forms]:
    """Write experts as `form` for the length of the block. `tokens`: B*S, None when it is symbolic.

    `stacked`: the model has experts that transformers hands to our function; without any, no signs are followed.
    """
    from partita.export.trace.experts.signs import Signs

    forms = Forms(form, tokens, Signs())
    followed: AbstractContextManager[Any] = forms.signs if stacked and form == "contrib" else nullcontext()
    _active.append(forms)
    try:
        with followed:
            yield forms
    finally:
        _active.pop()


def register() -> None:
    """Register our function with transformers; doing it twice does no harm."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


def has_stacked(model: torch.nn.Module) -> bool:
    """Whether the model has experts that transformers hands to a function of its interface."""
    return any(hasattr(module, STACKED) for module in model.modules())


STACKED = "is_concatenated"
"""An attribute that transformers' `use_experts_implementation` gives a module."""
LOOPS = frozenset({"top_k_index", "expert_size"})
"""Parameters of a forward that is given what a router chose, and loops over it."""


def refuse_loops(model: torch.nn.Module) -> None:
    """Refuse by name experts that transformers does not hand to any function of its interface.

    They loop over the experts that were hit, which depends on the tokens: a trace would end in an error of torch.
    """
    for name, module in model.named_modules():
        loops = LOOPS.intersection(inspect.signature(module.forward).parameters)
        if loops and not hasattr(module, STACKED):
            raise UnsupportedModelError(
                f"{name}: {type(module).__name__} loops over the selected experts outside transformers' "
                "experts interface; that cannot be exported yet"
            )


def _forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Registered experts function: hidden states [T, H], chosen experts and their weights [T, K] -> [T, H]."""
    if not _active:
        raise UnsupportedModelError(f"{type(module).__name__} was called outside of a trace")
    forms = _active[-1]
    experts = Experts.of(module)
    call = Call(experts, _in_rows(hidden_states), _in_rows(top_k_index), _in_rows(top_k_weights), forms.tokens)
    gate = contrib.gate_of(call, forms.signs) if forms.wanted == "contrib" else None
    if isinstance(gate, Gate):
        what, output = contrib.NAME, contrib.emit(call, gate)
    else:
        what, output = standard.emit(call)
    forms.decided[what if not gate or isinstance(gate, Gate) else f"{what}, because {gate}"] += 1
    return output if hidden_states.dim() == 2 else output.reshape(hidden_states.shape)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A row for each token; nothing where that is so already."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
