"""Quantised weights, and `--keep MODULE=PRECISION`: modules whose weights have another precision than the package."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import UsageError


@dataclass(frozen=True, slots=True)
class Keep:
    """One `--keep` setting."""

    pattern: str
    """Consecutive names in a module's path: `lm_head`, `layers.0`, `mlp.down_proj`."""
    precision: str

    @property
    def bits(self) -> int | None:
        """None: the weights are not quantised."""
        return PRECISIONS[self.precision].bits

    @property
    def stored(self) -> str | None:
        """The 16-bit dtype in which the weights are stored, with other activations; None for other precisions."""
        precision = PRECISIONS[self.precision]
        return precision.dtype if precision.bits is None and precision is not EXACT else None

    def fits(self, module: str) -> bool:
        """Whether it matches `module` or a parent. `layers.1` does not match `layers.10`."""
        return f".{self.pattern}." in f".{module}."


def read_keep(pairs: Sequence[tuple[str, str]], precision: str, dtype: str) -> tuple[Keep, ...]:
    """Parse the settings, as far as no model is needed. `dtype`: of the activations. Raises UsageError."""
    if pairs and PRECISIONS[precision].bits is None:
        raise UsageError(f"`keep` applies only to quantised weights; add `precision=int4` or int8 (it is {precision})")
    names = [name for name, each in PRECISIONS.items() if each.bits is not None or dtype in (EXACT.dtype, each.dtype)]
    for pattern, precision_name in pairs:
        if precision_name not in names:
            raise UsageError(f"`keep={pattern}={precision_name}`: choose one of {', '.join(names)}")
    return tuple(Keep(pattern, precision_name) for pattern, precision_name in pairs)


def paths(parameters: Sequence[str]) -> tuple[str, ...]:
    """Additional names of a weight: modules of joined parameters, and parameters such as stacks of experts."""
    # the only weight of a module may be shared with another module
    stacks = [name for name in parameters if not name.endswith(".weight")]
    return tuple(sorted(name.removesuffix(".weight") for name in (parameters if len(parameters) > 1 else stacks)))


def check_modules(keep: Sequence[Keep], modules: Collection[str]) -> None:
    """Raise UsageError for a pattern that matches no module, with the most similar name."""
    for each in keep:
        if any(each.fits(module) for module in modules):
            continue
        tails = {".".join(parts[i:]) for m in modules if (parts := m.split(".")) for i in range(len(parts))}
        near = difflib.get_close_matches(each.pattern, sorted(tails), n=1, cutoff=0.5)
        hint = f"; {near[0]} is one" if near else f"; one of its modules is {max(modules, key=len, default='none')}"
        raise UsageError(f"`keep={each.pattern}={each.precision}`: the model has no such module{hint}")
