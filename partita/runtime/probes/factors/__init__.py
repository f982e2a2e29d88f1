"""Factors of the experiments on a node, one file each; the file name is the factor of a trial in a report.

A file has `FACTOR`, a `base.Factor`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from partita.diagnosis.reasons.base import load_reasons
from partita.runtime.probes.factors.base import Factor

__all__ = ["Factor", "factors"]


@cache
def factors() -> tuple[Factor, ...]:
    """Every factor of this folder, in the order in which they are tried.

    Raises ValueError when one is not called as its file, or not exactly one reason says that it is what a change in it
    shows: such a change would decide a node, and explain nothing.
    """
    found = []
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "base"):
        factor = importlib.import_module(f"{__name__}.{name}").FACTOR
        if not isinstance(factor, Factor) or factor.name != name:
            raise ValueError(f"{__name__}.{name}: FACTOR must be a Factor whose name is {name!r}")
        found.append(factor)
    named = [factor for reason in load_reasons() for factor in reason.factors]
    for factor in found:
        if named.count(factor.name) != 1:
            raise ValueError(
                f"{__name__}.{factor.name}: {named.count(factor.name)} reasons name it in `factors`, not 1"
            )
    return tuple(sorted(found, key=lambda each: (each.rank, each.name)))
