"""Modules whose weights are to have another precision than the package: what may be said, and of which modules."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import UsageError

WEIGHT = ".weight"
"""End of the name of what a module multiplies by, where that is all that it has."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What was said of some modules."""

    pattern: str
    """Names that follow one another in a module's path: `lm_head`, `layers.0`, `mlp.down_proj`."""
    precision: str

    @property
    def bits(self) -> int | None:
        """None: their weights are not packed."""
        return PRECISIONS[self.precision].bits

    @property
    def stored(self) -> str | None:
        """The type of 16 bits that their weights are kept in and not computed with; None for any other."""
        precision = PRECISIONS[self.precision]
        return precision.dtype if precision.bits is None and precision is not EXACT else None

    def fits(self, module: str) -> bool:
        """Whether it is said of `module`, or of one that it is in. `layers.1` is not said of `layers.10`."""
        return f".{self.pattern}." in f".{module}."


def read_keep(pairs: Sequence[tuple[str, str]], precision: str, dtype: str) -> tuple[Keep, ...]:
    """Check what was said of modules as far as that needs no model. `dtype`: what the package computes in.

    Raises UsageError.
    """
    if pairs and PRECISIONS[precision].bits is None:
        raise UsageError(f"`keep` is about packed weights: it needs `precision=int4` or int8, and this is {precision}")
    names = [name for name, each in PRECISIONS.items() if each.bits is not None or dtype in (EXACT.dtype, each.dtype)]
    for pattern, wanted in pairs:
        if wanted not in names:
            raise UsageError(f"`keep={pattern}={wanted}`: choose one of {', '.join(names)}")
    return tuple(Keep(pattern, wanted) for pattern, wanted in pairs)


def paths(parameters: Sequence[str]) -> tuple[str, ...]:
    """What a weight is known by besides the module that multiplies by it: modules of the parameters that it was joined
    from, and the parameters themselves where a module has several, as stacks of experts. One that is the only weight
    of a module may be shared with another module, which is not meant.
    """
    stacks = [name for name in parameters if not name.endswith(WEIGHT)]
    return tuple(sorted(name.removesuffix(WEIGHT) for name in (parameters if len(parameters) > 1 else stacks)))


def check_modules(keep: Sequence[Keep], modules: Collection[str]) -> None:
    """Raise UsageError for a pattern that fits none of the model's modules, with the name that is most like it."""
    for each in keep:
        if any(each.fits(module) for module in modules):
            continue
        tails = {".".join(parts[i:]) for m in modules if (parts := m.split(".")) for i in range(len(parts))}
        near = difflib.get_close_matches(each.pattern, sorted(tails), n=1, cutoff=0.5)
        hint = f"; {near[0]} is one" if near else f"; one that it has is {max(modules, key=len, default='none')}"
        raise UsageError(f"`keep={each.pattern}={each.precision}`: the model has no such module{hint}")
