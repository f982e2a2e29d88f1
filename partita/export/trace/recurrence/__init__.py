"""Recurrences of linear attention and state space models, one file each, with `RECURRENCE`, a `base.Recurrence`.

transformers has one function per recurrence, shared by models, as a place to plug in faster kernels
(`use_kernel_func_from_hub_with_fallback`). The functions listed here are replaced in a trace, because the originals
loop over tokens, or start from zeros in every step. Others are traced unchanged.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch

from partita.export.trace.operators import Form
from partita.export.trace.recurrence.base import Recurrence

__all__ = ["Recurrence", "read_states", "recurrences", "replaced", "used_by"]


def recurrences() -> dict[str, Recurrence]:
    """Name of a transformers function -> its replacement."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "base")
    found = [importlib.import_module(f"{__name__}.{name}").RECURRENCE for name in names]
    assert all(isinstance(entry, Recurrence) for entry in found)
    return {function: entry for entry in found for function in entry.functions}


def used_by(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the replaceable functions in the modelling code of `model`."""
    known = recurrences()
    return tuple(sorted({name for module in _modelling_code(model) for name in known if hasattr(module, name)}))


def read_states(model: torch.nn.Module) -> bool:
    """Whether a recurrence of `model` reads its state itself."""
    known = recurrences()
    return any(known[name].reads_state for name in used_by(model))


@contextmanager
def replaced(model: torch.nn.Module, form: Form) -> Iterator[None]:
    """In this block the modelling code of `model` computes its recurrences in `form`."""
    known = recurrences()
    with ExitStack() as stack:
        for module in _modelling_code(model):
            for name, recurrence in known.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, recurrence.written(form))
        yield


def _modelling_code(model: torch.nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of `model`."""
    return [sys.modules[name] for name in sorted({type(part).__module__ for part in model.modules()})]
