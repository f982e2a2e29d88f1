"""Lowerings of attention and cache, one file each. The file name is the value of ``--attention``."""

from __future__ import annotations

import importlib
import pkgutil

from partita.errors import UsageError
from partita.export.trace.attention.base import Lowering

__all__ = ["GROWING", "Lowering", "lowering", "names", "ranked"]


GROWING = "growing"
"""The lowering of `--cache growing`, not available through `--attention`."""


def names() -> tuple[str, ...]:
    """Names of all lowerings with a static cache, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", GROWING)))


def ranked() -> tuple[Lowering, ...]:
    """All lowerings with a static cache in order of preference, for `auto`."""
    return tuple(sorted((lowering(name) for name in names()), key=lambda each: (each.rank, each.name)))


def lowering(name: str) -> Lowering:
    """The lowering with this name. Raises UsageError, which lists the names, where there is none."""
    if name not in (*names(), GROWING):
        raise UsageError(f"`attention={name}`: unknown lowering; choose one of auto, {', '.join(names())}")
    found = importlib.import_module(f"{__name__}.{name}").LOWERING
    assert isinstance(found, Lowering)
    return found
