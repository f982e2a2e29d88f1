"""Which weight is packed how: the precision of the package, and what was said of single modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from partita.export.options import BLOCK_SIZES, ExportOptions
from partita.export.quantisation.keep import Keep, check_modules, read_keep
from partita.export.quantisation.kernels import Kernels
from partita.export.quantisation.operators import ASKED_WIDTH, settled
from partita.export.quantisation.packed import Packing
from partita.export.quantisation.rounded import Rounded
from partita.export.quantisers import Grid
from partita.export.target import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """How the weights of a package are packed."""

    bits: int
    block_size: int | None
    """As asked for; None: the target's default, or what divides a row where that does not."""
    quantiser: str
    kernels: Kernels
    keep: tuple[Keep, ...] = ()
    rounded: Rounded | None = None
    """What a calibration finds; None without one."""

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
    rounded = None if options.calibrate is None else Rounded()
    plan = Plan(bits, options.block_size, options.rounding, kernels, keep, rounded)
    if target is None:
        return plan
    forms = [plan.packed(each, ASKED_WIDTH) for each in plan.all_bits]
    found = settled(target, forms, options.computing.dtype)
    if found.symmetric != kernels.symmetric:
        told(f"{target.provider} takes packed weights {'without' if found.symmetric else 'with'} zero points only")
    return replace(plan, kernels=found)
