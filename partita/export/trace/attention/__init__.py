"""Lowerings of attention and cache, one file each; the file name is the name users give to ``--attention``."""

from __future__ import annotations

import importlib
import pkgutil

from partita.errors import UsageError
from partita.export.trace.attention.base import Lowering

__all__ = ["GROWING", "Lowering", "lowering", "names", "ranked"]


GROWING = "growing"
"""The lowering of `--cache growing`, which is none that `--attention` takes."""


def names() -> tuple[str, ...]:
    """Names of all lowerings with a cache of fixed size, sorted. Loads none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", GROWING)))


def ranked() -> tuple[Lowering, ...]:
    """All lowerings with a cache of fixed size, the best first: what `auto` chooses among."""
    return tuple(sorted((lowering(name) for name in names()), key=lambda each: (each.rank, each.name)))


def lowering(name: str) -> Lowering:
    """The lowering called `name`; UsageError lists the names when there is none."""
    if name not in (*names(), GROWING):
        raise UsageError(f"`attention={name}`: no such lowering; choose one of auto, {', '.join(names())}")
    found = importlib.import_module(f"{__name__}.{name}").LOWERING
    assert isinstance(found, Lowering)
    return found
