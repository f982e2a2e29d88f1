"""Quantisers, one file each: blocks of a weight -> integers, a scale and a zero point per block.

They get a few rows at a time, independent of graphs, files and packing.
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
"""The quantiser with a calibration text."""
CALIBRATING = frozenset({CALIBRATED})
"""Quantisers that need a text, listed so that options are checked without importing torch."""


def names() -> tuple[str, ...]:
    """Names of all quantisers, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def check_name(name: str) -> None:
    """Raise UsageError, which lists the names, for an unknown quantiser. Imports none of them."""
    if name not in names():
        raise UsageError(f"`quantiser={name}`: unknown quantiser; choose one of {', '.join(names())}")


def quantiser(name: str) -> Quantiser:
    """The quantiser with this name. Raises UsageError where there is none."""
    check_name(name)
    found = importlib.import_module(f"{__name__}.{name}").QUANTISER
    assert isinstance(found, Quantiser)
    return found


def without_text(name: str) -> str:
    """The quantiser for weights that the calibration text does not reach."""
    return name if quantiser(name).calibrate is None else DEFAULT
