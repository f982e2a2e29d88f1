"""Which weight is packed how: the precision of the package, and what was said of single modules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from partita.dtypes import PRECISIONS
from partita.errors import UsageError
from partita.export.quantisation.operators import ASKED_WIDTH, Kernels, settled
from partita.export.quantisation.packed import Packing
from partita.export.quantisers import Grid
from partita.spelling import spelled

if TYPE_CHECKING:
    from partita.export.options import ExportOptions
    from partita.export.target import Target

BLOCK_SIZES = (32, 64, 128)


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

    def fits(self, module: str) -> bool:
        """Whether it is said of `module`, or of one that it is in. `layers.1` is not said of `layers.10`."""
        return f".{self.pattern}." in f".{module}."


@dataclass(frozen=True, slots=True)
class Plan:
    """How the weights of a package are packed."""

    bits: int
    block_size: int | None
    """As asked for; None: the target's default, or what divides a row where that does not."""
    quantiser: str
    kernels: Kernels
    keep: tuple[Keep, ...] = ()

    def packing(self, modules: Iterable[str], width: int, *, embedding: bool = False) -> Packing | None:
        """How a weight of `modules`, with rows of `width`, is packed; None when it is not. What was said last counts.

        `embedding`: it is only ever looked up, which reads a row of it: eight bits cost no time and hardly any quality.
        """
        where = list(modules)
        said = [keep for keep in self.keep if any(keep.fits(module) for module in where)]
        bits = said[-1].bits if said else 8 if embedding else self.bits
        return None if bits is None else self.packed(bits, width)

    def packed(self, bits: int, width: int) -> Packing:
        """A packing of so many bits for rows of `width`, as the target takes it."""
        default = self.kernels.block_sizes[bits]
        dividing = (size for size in reversed(BLOCK_SIZES) if size <= default and width % size == 0)
        size = self.block_size or next(dividing, BLOCK_SIZES[0])
        return Packing(Grid(bits, self.kernels.symmetric), size, self.quantiser)

    @property
    def all_bits(self) -> tuple[int, ...]:
        """Every width that may be needed: that of the package, those that were asked for, and that of embeddings."""
        return tuple(dict.fromkeys([self.bits, *(keep.bits for keep in self.keep if keep.bits is not None), 8]))


def read_keep(pairs: Sequence[tuple[str, str]], precision: str) -> tuple[Keep, ...]:
    """Check what was said of modules as far as that needs no model. Raises UsageError."""
    if pairs and PRECISIONS[precision].bits is None:
        raise UsageError(
            f"{spelled('keep')} is about packed weights: it needs {spelled('precision', 'int4')} or int8, and this is "
            f"{precision}"
        )
    names = [name for name, each in PRECISIONS.items() if each.bits is not None or each.dtype == "float32"]
    for pattern, wanted in pairs:
        if wanted not in names:
            raise UsageError(f"{spelled('keep', f'{pattern}={wanted}')}: choose one of {', '.join(names)}")
    return tuple(Keep(pattern, wanted) for pattern, wanted in pairs)


def check_modules(keep: Sequence[Keep], modules: Collection[str]) -> None:
    """Raise UsageError for a pattern that fits none of the model's modules, with the name that is most like it."""
    for each in keep:
        if any(each.fits(module) for module in modules):
            continue
        tails = {".".join(parts[i:]) for m in modules if (parts := m.split(".")) for i in range(len(parts))}
        near = difflib.get_close_matches(each.pattern, sorted(tails), n=1, cutoff=0.5)
        hint = f"; {near[0]} is one" if near else ""
        raise UsageError(f"{spelled('keep', f'{each.pattern}={each.precision}')}: the model has no such module{hint}")


def make_plan(
    options: ExportOptions, target: Target | None, modules: Collection[str], told: Callable[[str], object] = len
) -> Plan | None:
    """The plan of an export; None when its precision packs nothing.

    Asks the target which form it takes. Raises UsageError for a module that is not there, ProviderError for a form that
    there is no kernel for.
    """
    bits = options.computing.bits
    if bits is None:
        return None
    keep = read_keep(options.keep, options.precision)
    check_modules(keep, modules)
    kernels = Kernels() if target is None else target.kernels
    plan = Plan(bits, options.block_size, options.quantiser, kernels, keep)
    if target is None:
        return plan
    forms = [plan.packed(each, ASKED_WIDTH) for each in plan.all_bits]
    found = settled(kernels, forms, options.computing.dtype, target.provider, target.ask)
    if found.symmetric != kernels.symmetric:
        told(f"{target.provider} takes packed weights {'without' if found.symmetric else 'with'} zero points only")
    return replace(plan, kernels=found)
