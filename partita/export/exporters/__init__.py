"""Exporters, one file each: (checkpoint, options) -> graphs and the contract by which they are run.

What comes after, writing, verifying and publishing, is the same for all of them and needs no more than their result.
"""

from __future__ import annotations

import importlib
import pkgutil

from partita.errors import UsageError
from partita.export.exporters.base import Attempts, Exported, Exporter
from partita.spelling import spelled

__all__ = ["Attempts", "Exported", "Exporter", "check_name", "exporter", "names"]


def names() -> tuple[str, ...]:
    """Names of all exporters, sorted. Loads none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def check_name(name: str) -> None:
    """Raise UsageError, which lists the names, when there is no exporter called `name`. Loads none of them."""
    if name not in names():
        raise UsageError(f"{spelled('exporter', name)}: no such exporter; choose one of {', '.join(names())}")


def exporter(name: str) -> Exporter:
    """The exporter called `name`. Raises UsageError when there is none."""
    check_name(name)
    found = importlib.import_module(f"{__name__}.{name}").EXPORTER
    assert isinstance(found, Exporter)
    return found
