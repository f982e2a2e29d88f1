"""Recurrences of linear attention and state space models. Each file has `RECURRENCES`: function name -> replacement.

transformers has one function per recurrence, shared by models, as a place to plug in faster kernels
(`use_kernel_func_from_hub_with_fallback`). The functions listed here are replaced in a trace, because the originals
loop over tokens, or start from zeros in every step. Others are traced unchanged. One `com.microsoft::LinearAttention`
node is a recurrence over any number of tokens:

    gated        S = exp(decay) S + k v';                            output = scale q' S
    gated_delta  S = exp(decay) S + beta k (v - S' k)', S decayed;   output = scale q' S

Source: ONNX Runtime ContribOperators.md, LinearAttention.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from partita.export.trace import Form


def recurrences() -> dict[str, Recurrence]:
    """Name of a transformers function -> its replacement."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {function: found for module in modules for function, found in module.RECURRENCES.items()}


def used_by(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the replaceable functions in the modelling code of `model`."""
    known = recurrences()
    return tuple(sorted({name for module in modelling_code(model) for name in known if hasattr(module, name)}))


def read_states(model: torch.nn.Module) -> bool:
    """Whether a recurrence of `model` reads its state itself."""
    known = recurrences()
    return any(known[name].reads_state for name in used_by(model))


@contextmanager
def replace_recurrences(model: torch.nn.Module, form: Form) -> Iterator[None]:
    """In this block the modelling code of `model` computes its recurrences in `form`."""
    known = recurrences()
    with ExitStack() as stack:
        for module in modelling_code(model):
            for name, recurrence in known.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, partial(recurrence.run, form))
        yield


def modelling_code(model: torch.nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of `model`."""
    return [sys.modules[name] for name in sorted({type(part).__module__ for part in model.modules()})]


Function = Callable[..., Any]
"""A function with the arguments and results of the replaced one, after a form."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A transformers function that loops over tokens, and its replacements in a trace."""

    run: Function
    """The form, and the arguments. `contrib`: ONNX Runtime's operators, for any number of tokens; `standard`: standard
    operators, for a fixed number."""
    reads_state: bool = False
    """It reads the layer's last state itself: the model gets no state, and always takes its code path for several
    tokens."""


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [B, S, H, Dv] and the new state.

    query, key [B, S, H, Dk], value [B, S, H, Dv], state [B, H, Dk, Dv], decay [B, S, H] or [B, S, H, Dk], beta [B, S,
    H].
    """
    import torch.onnx.ops as onnx_ops

    batch, length, heads, value_width = value.shape
    packed = [tensor.reshape(batch, length, -1) for tensor in (query, key, value)]
    inputs: list[torch.Tensor] = [*packed, state, decay.reshape(batch, length, -1)]
    if beta is not None:
        inputs.append(beta)
    rule = "gated" if beta is None else "gated_delta"
    output, present = onnx_ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        inputs,
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": scale},
        dtypes=(value.dtype, state.dtype),
        shapes=((batch, length, heads * value_width), state.shape),
        version=1,
    )
    return output.reshape(batch, length, heads, value_width), present
