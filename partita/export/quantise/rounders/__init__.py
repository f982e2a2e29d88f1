"""Quantisers, one file each: blocks of a weight -> small integers, a scale and a zero point for each block.

They see a few rows at a time and know nothing of graphs, files or how the integers are packed.
"""

from __future__ import annotations

import importlib
import pkgutil

from partita.errors import UsageError
from partita.export.quantise.rounders.base import Grid, Quantised, Quantiser

__all__ = [
    "CALIBRATED",
    "CALIBRATING",
    "DEFAULT",
    "Grid",
    "Quantised",
    "Quantiser",
    "check_name",
    "names",
    "quantiser",
    "without_text",
]
DEFAULT = "refit"
CALIBRATED = "gptq"
"""What is used with a text."""
CALIBRATING = frozenset({CALIBRATED})
"""Quantisers that take a text; here so that options are checked without torch."""


def names() -> tuple[str, ...]:
    """Names of all quantisers, sorted. Loads none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def check_name(name: str) -> None:
    """Raise UsageError, which lists the names, when there is no quantiser called `name`. Loads none of them."""
    if name not in names():
        raise UsageError(f"`quantiser={name}`: no such quantiser; choose one of {', '.join(names())}")


def quantiser(name: str) -> Quantiser:
    """The quantiser called `name`. Raises UsageError when there is none."""
    check_name(name)
    found = importlib.import_module(f"{__name__}.{name}").QUANTISER
    assert isinstance(found, Quantiser)
    return found


def without_text(name: str) -> str:
    """The quantiser that rounds as `name` does what no text reaches: itself, where it takes none."""
    return name if quantiser(name).calibrate is None else DEFAULT
