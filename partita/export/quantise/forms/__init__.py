"""Forms of packed weights, one file each: the operators that read them, and how those want them laid out.

A target is asked about one after the other, and the first that it takes whole is written.
"""

from __future__ import annotations

import importlib
import pkgutil

from partita.export.quantise.forms.base import ExpertsCall, Form, LookUp, Place, Product, Weight

__all__ = ["ExpertsCall", "Form", "LookUp", "Place", "Product", "Weight", "candidates", "form", "names"]


def names() -> tuple[str, ...]:
    """Names of all forms, sorted. Loads none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def form(name: str) -> Form:
    """The form called `name`. Raises KeyError when there is none."""
    if name not in names():
        raise KeyError(name)
    found = importlib.import_module(f"{__name__}.{name}").FORM
    assert isinstance(found, Form)
    return found


def candidates(*, rounds_activations: bool, standard: bool) -> tuple[Form, ...]:
    """Forms to ask about, the best first.

    `rounds_activations`: products are to be of 8-bit integers, activations included. `standard`: ONNX's own
    operators first, for a compiler, and for a lowering that has no others.
    """
    order = ("matmul_nbits", "dequantize_linear")
    if rounds_activations:
        order = ("matmul_integer_to_float", "matmul_integer")
    return tuple(form(name) for name in (reversed(order) if standard else order))
