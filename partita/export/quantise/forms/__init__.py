"""Forms of quantised weights, one file each: their operators and layouts."""

from __future__ import annotations

import importlib
import pkgutil

from partita.export.quantise.forms.base import ExpertsCall, Form, LookUp, Place, Product, Weight

__all__ = ["ExpertsCall", "Form", "LookUp", "Place", "Product", "Weight", "candidates", "form", "names"]


def names() -> tuple[str, ...]:
    """Names of all forms, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def form(name: str) -> Form:
    """The form with this name. Raises KeyError where there is none."""
    if name not in names():
        raise KeyError(name)
    found = importlib.import_module(f"{__name__}.{name}").FORM
    assert isinstance(found, Form)
    return found


def candidates(*, rounds_activations: bool, standard: bool) -> tuple[Form, ...]:
    """Forms to probe, in order of preference.

    `rounds_activations`: integer products, with activations quantised to 8 bits. `standard`: ONNX operators first, for
    a compiler, or a lowering without contrib operators.
    """
    order = ("matmul_nbits", "dequantize_linear")
    if rounds_activations:
        order = ("matmul_integer_to_float", "matmul_integer")
    return tuple(form(name) for name in (reversed(order) if standard else order))
