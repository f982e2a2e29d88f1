"""The quantisation plan: precision of the package, and settings of single modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from partita.errors import UsageError
from partita.export.options import BLOCK_SIZES, INTEGERS, ExportOptions
from partita.export.quantise import Keep, check_modules, read_keep
from partita.export.quantise.calibrate import CalibratedWeights
from partita.export.quantise.form_probes import (
    PROBED_WIDTH,
    first_supported,
    refusal_reason,
    refused_experts,
    smaller_blocks,
)
from partita.export.quantise.forms import Form, candidates
from partita.export.quantise.quantisers import Grid, without_text
from partita.export.quantise.write.stored_integers import AsStored
from partita.export.quantise.write.weight_source import Packing
from partita.export.target import AUTO, Kernels, Target
from partita.export.trace.attention import lowering


@dataclass(frozen=True, slots=True)
class Plan:
    """How the weights of a package are quantised."""

    bits: int
    block_size: int | None
    """As requested; None: the target's default. Rows that it does not divide get a smaller one."""
    quantiser: str
    kernels: Kernels
    form: Form
    keep: tuple[Keep, ...] = ()
    activations: str = "fp32"
    """The activation precision of quantised products, as --activations."""
    rounded: CalibratedWeights | None = None
    """Calibrated weights; None without calibration."""
    stored: AsStored | None = None
    """Keeps stored integers; other weights stay floats unless a setting matches. None: every weight is quantised."""

    def packing(self, modules: Iterable[str], width: int, *, embedding: bool = False) -> Packing | None:
        """The packing of a weight with rows of `width`, by the last matching setting; None where it stays a float."""
        setting = self.setting(modules)
        default = None if self.stored is not None else 8 if embedding else self.bits
        bits = default if setting is None else setting.bits
        if bits is None:
            return None
        return self.embedding_packing(bits, width) if embedding else self.packed(bits, width)

    def experts(self, modules: Iterable[str], widths: Collection[int]) -> Packing | None:
        """The packing of one layer's expert stacks, with rows of `widths`; None where they stay floats."""
        setting, default = self.setting(modules), None if self.stored is not None else self.bits
        bits = default if setting is None else setting.bits
        if bits is None or self.form.experts is None or not self.kernels.experts:
            return None
        size = next(self._dividing(bits, *widths), None)
        return None if size is None else Packing(Grid(bits, self.kernels.symmetric), size, self.quantiser)

    def setting(self, modules: Iterable[str]) -> Keep | None:
        """The last setting that matches any of the modules."""
        where = list(modules)
        return next((keep for keep in reversed(self.keep) if any(keep.fits(module) for module in where)), None)

    def kept_by_setting(self, modules: Iterable[str]) -> bool:
        """Whether a setting keeps the weights of one of `modules` unquantised."""
        setting = self.setting(modules)
        return setting is not None and setting.bits is None

    def packed(self, bits: int, width: int) -> Packing | None:
        """A packing for products with rows of `width`; None where blocks must divide a row and none does."""
        if self.form.one_scale:
            return Packing(Grid(bits, symmetric=True), width, self.quantiser)
        size = next(self._dividing(bits, width), BLOCK_SIZES[0] if self.form.fills_up else None)
        return None if size is None else Packing(Grid(bits, self.kernels.symmetric), size, self.quantiser)

    def embedding_packing(self, bits: int, width: int) -> Packing | None:
        """A packing for an embedding."""
        if not self.form.look_up.symmetric:
            return self.packed(bits, width)
        size = next(self._dividing(8, width), width)
        return Packing(Grid(8, symmetric=True), size, self.quantiser)

    def _dividing(self, bits: int, *widths: int) -> Iterator[int]:
        """Block sizes that divide a row, from the requested size down."""
        wanted = self.block_size or self.kernels.block_sizes[bits]
        smaller = sorted((size for size in self.kernels.smaller if size < wanted), reverse=True)
        return (size for size in (wanted, *smaller) if not any(width % size for width in widths))

    @property
    def calibration_bits(self) -> tuple[int, ...]:
        """All bits to which weights may be quantised: of the package unless stored, settings, embeddings."""
        return self.multiplied_bits if self.stored is not None else tuple(dict.fromkeys([*self.multiplied_bits, 8]))

    @property
    def multiplied_bits(self) -> tuple[int, ...]:
        """The bits of products; looked-up embeddings may have eight bits besides."""
        requested = [keep.bits for keep in self.keep if keep.bits is not None]
        return tuple(dict.fromkeys(requested if self.stored is not None else [self.bits, *requested]))


def make_plan(
    options: ExportOptions,
    target: Target | None,
    modules: Collection[str],
    note: Callable[[str], object] = len,
    *,
    has_experts: bool = False,
    stored: AsStored | None = None,
) -> Plan | None:
    """The plan of an export; None where nothing is quantised. Probes the target. Raises UsageError, ProviderError."""
    bits = options.computing.bits
    if bits is None:
        return None
    keep = read_keep(tuple((options.keep or {}).items()), options.named, options.computing.dtype)
    check_modules(keep, modules)
    kernels = Kernels() if target is None else target.kernels
    forms = candidates(
        rounds_activations=options.activations == INTEGERS,
        standard=kernels.folds or (options.attention != AUTO and not lowering(options.attention).domains),
    )
    forms = _fitting(forms, options, keep)
    rounded = None if options.calibrate is None else CalibratedWeights()
    activations = options.activations or "fp32"
    plan = Plan(bits, options.block_size, options.rounding, kernels, forms[0], keep, activations, rounded, stored)
    if target is None:
        return plan
    taken = [] if stored is None else stored.packings()
    multiplied_bits = plan.calibration_bits if options.searches else plan.multiplied_bits

    def products(tried: Plan) -> list[Packing]:
        return [found for bits in multiplied_bits if (found := tried.packed(bits, PROBED_WIDTH)) is not None]

    def embeddings(tried: Plan) -> list[Packing]:
        return [found for bits in plan.calibration_bits if (found := tried.embedding_packing(bits, PROBED_WIDTH))]

    def multiplied(form: Form, kernels: Kernels) -> list[Packing]:
        as_they_are = [replace(each, block_size=PROBED_WIDTH) if form.one_scale else each for each in taken]
        return [*as_they_are, *products(replace(plan, form=form, kernels=kernels))]

    def looked_up(form: Form, kernels: Kernels) -> list[Packing]:
        as_they_are = [each for each in taken if supports_stored_lookup(form, each)]
        return list(dict.fromkeys([*as_they_are, *embeddings(replace(plan, form=form, kernels=kernels))]))

    dtype = options.computing.dtype
    option = ("activations", INTEGERS) if options.activations == INTEGERS else None
    form, found = first_supported(target, forms, multiplied, looked_up, dtype, option=option)
    if found.symmetric != kernels.symmetric:
        note(
            f"{target.provider} supports quantised weights {'without' if found.symmetric else 'with'} zero points only"
        )
    if form is not forms[0]:
        note(f"{target.provider} does not support {forms[0].summary}; quantised weights are stored for {form.summary}")
    if stored is not None:
        stored = _supported_by(target, form, found, stored, dtype)
        plan = replace(plan, stored=stored)
    if has_experts and found.experts and form.experts is not None:
        reason = refused_experts(target, form, found, multiplied(form, found), dtype)
        found = replace(found, experts=not reason)
        if reason:
            note(f"experts stay floats; {form.experts.operator} on {target.provider}: {reason}")
    plan = replace(plan, form=form, kernels=found)
    if form.one_scale:
        return plan
    most = max((plan.block_size or found.block_sizes[each] for each in plan.calibration_bits), default=0)
    sizes = tuple(size for size in found.smaller if size < most)
    probed = plan

    def in_blocks(size: int) -> list[Packing]:
        return products(replace(probed, block_size=size))

    def looked_up_in(size: int) -> list[Packing]:
        return list(dict.fromkeys(embeddings(replace(probed, block_size=size))))

    smaller = smaller_blocks(target, form, found, sizes, in_blocks, looked_up_in, dtype)
    return replace(plan, kernels=replace(found, smaller=smaller))


def prefill_plan(options: ExportOptions, target: Target | None, plan: Plan | None) -> Plan | None:
    """The plan of a separate prefill graph with 8-bit integer products; None when none was requested.

    Prefill is compute-bound and a decode step memory-bound: an integer matrix unit is faster for many tokens, and fewer
    bytes are faster for one. Both graphs share one cache. The head and embeddings are those of the decode graph.

    Raises UsageError for activations other than float32, and ProviderError when the target has no kernel.
    """
    requested = options.prefill_precision
    if requested is None or plan is None:
        return None
    option = ("prefill_precision", requested)
    if options.computing.dtype != "float32":
        raise UsageError(
            f"`prefill_precision={requested}`: the package computes in {options.computing.dtype} between its "
            "products, but the prefill graph in float32; add `activations=fp32`, or omit it"
        )
    forms = candidates(rounds_activations=True, standard=plan.kernels.folds or not plan.form.domains)
    # Weights kept unquantised stay so in both graphs; all other bits become those of this form.
    keep = tuple(each if each.bits is None else replace(each, precision=INTEGERS) for each in plan.keep)
    own = Plan(8, None, without_text(plan.quantiser), plan.kernels, forms[0], keep, INTEGERS)
    if target is None:
        return own

    def packings(form: Form, kernels: Kernels) -> list[Packing]:
        found = replace(own, form=form, kernels=kernels).packed(8, PROBED_WIDTH)
        return [] if found is None else [found]

    taken, _ = first_supported(target, forms, packings, packings, options.computing.dtype, option=option)
    return replace(own, form=taken)


def supports_stored_lookup(form: Form, packing: Packing) -> bool:
    """Whether an embedding with this packing can be looked up in a form."""
    return not form.look_up.symmetric or (packing.grid.symmetric and packing.grid.bits == 8)


def _supported_by(target: Target, form: Form, kernels: Kernels, stored: AsStored, dtype: str) -> AsStored:
    """Stored integers with the block sizes that `target` supports."""
    if target.ask is None or form.one_scale:
        return stored
    packings = stored.packings()

    def in_blocks(size: int) -> list[Packing]:
        return [replace(each, block_size=size) for each in packings]

    sizes = tuple(size for size in stored.blocks() if not refusal_reason(target, form, kernels, in_blocks(size), dtype))
    return replace(stored, sizes=sizes)


def _fitting(forms: tuple[Form, ...], options: ExportOptions, keep: tuple[Keep, ...]) -> tuple[Form, ...]:
    """The forms that the requested operator set allows. Raises UsageError when there is none."""
    found = tuple(form for form in forms if options.opset is None or form.opset <= options.opset)
    if not found:
        raise UsageError(
            f"`opset={options.opset}`: quantised weights as {forms[0].summary} need {forms[0].opset} or newer"
        )
    for form in found:
        for each in keep:
            if each.bits is not None and each.bits not in form.bits:
                raise UsageError(f"`keep={each.pattern}={each.precision}`: {form.summary} supports only int8 weights")
    return found
