"""The quantisation plan: precision of the package, and settings of single modules.

The target is probed for a form of quantised weights before the model is traced. A probe contains the nodes that the
form would write, with zero weights. A provider that dequantises the whole matrix in every run, as the CPU provider does
at some levels, counts as one without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from partita.errors import ProviderError, UsageError
from partita.export.options import BLOCK_SIZES, INTEGERS, ExportOptions
from partita.export.passes.base import added
from partita.export.quantise import Grid, Keep, Packing, check_modules, forms, integer_forms, read_keep, without_text
from partita.export.quantise.forms import Form, Place, Weight
from partita.export.quantise.stored_integers import AsStored
from partita.export.quantise.weight_source import CalibratedWeights, Layout
from partita.export.target import AUTO, Kernels, Target
from partita.export.trace.attention import lowering
from partita.export.weights import to_ir

USUAL = frozenset({32, 64})
"""Smaller blocks that are assumed to be supported without a probe."""
FORMS = {each.name: each for each in (*forms.FORMS, *integer_forms.FORMS)}
Use = Literal["product", "lookup", "experts"]
"""The operator that reads a weight."""


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
    rounded: CalibratedWeights = field(default_factory=CalibratedWeights, compare=False)
    stored: AsStored | None = None
    """Keeps stored integers; other weights stay floats unless a setting matches. None: every weight is quantised."""

    def packing(self, modules: Iterable[str], *widths: int, use: Use = "product") -> Packing | None:
        """The packing of weights with rows of `widths`, by the last matching setting; None where they stay floats.

        Several weights are the expert stacks of one operator.
        """
        setting, default = self.setting(modules), 8 if use == "lookup" else self.bits
        bits = setting.bits if setting is not None else default if self.stored is None else None
        if bits is None or (use == "experts" and not (self.form.experts and self.kernels.experts)):
            return None
        return self.embedding_packing(bits, *widths) if use == "lookup" else self.packed(bits, *widths)

    def setting(self, modules: Iterable[str]) -> Keep | None:
        """The last setting that matches any of the modules."""
        where = list(modules)
        return next((keep for keep in reversed(self.keep) if any(keep.fits(module) for module in where)), None)

    def packed(self, bits: int, *widths: int) -> Packing | None:
        """A packing for products with rows of `widths`; None where blocks must divide a row and none does."""
        if self.form.one_scale:
            return Packing(Grid(bits, symmetric=True), widths[0], self.quantiser)
        fills_up = self.form.fills_up and len(widths) == 1  # not in stacks of experts
        size = next(self._dividing(bits, *widths), BLOCK_SIZES[0] if fills_up else None)
        return None if size is None else Packing(Grid(bits, self.kernels.symmetric), size, self.quantiser)

    def embedding_packing(self, bits: int, width: int) -> Packing | None:
        """A packing for an embedding."""
        if not self.form.look_up.symmetric:
            return self.packed(bits, width)
        size = next(self._dividing(8, width), width)
        return Packing(Grid(8, symmetric=True), size, self.quantiser)

    def looks_up(self, packing: Packing) -> bool:
        """Whether an embedding with the packing of a product can be looked up."""
        return not self.form.look_up.symmetric or packing.grid == Grid(8, symmetric=True)

    def _dividing(self, bits: int, *widths: int) -> Iterator[int]:
        """Block sizes that divide a row, from the requested size down."""
        wanted = self.block_size or self.kernels.block_sizes[bits]
        smaller = sorted((size for size in self.kernels.smaller if size < wanted), reverse=True)
        return (size for size in (wanted, *smaller) if not any(width % size for width in widths))

    @property
    def multiplied_bits(self) -> tuple[int, ...]:
        """The bits of products: of the package unless stored, and of settings."""
        requested = [keep.bits for keep in self.keep if keep.bits is not None]
        return tuple(dict.fromkeys(requested if self.stored is not None else [self.bits, *requested]))

    @property
    def all_bits(self) -> tuple[int, ...]:
        """The bits of products and of looked-up embeddings."""
        return self.multiplied_bits if self.stored is not None else tuple(dict.fromkeys([*self.multiplied_bits, 8]))


def make_plan(
    options: ExportOptions,
    target: Target | None,
    modules: Collection[str],
    note: Callable[[str], object] = len,
    *,
    stored: AsStored | None = None,
) -> Plan | None:
    """The plan of an export; None where nothing is quantised. Probes the target. Raises UsageError, ProviderError."""
    bits = options.computing.bits
    if bits is None:
        return None
    keep = read_keep(tuple((options.keep or {}).items()), options.named, options.computing.dtype)
    check_modules(keep, modules)
    kernels = Kernels() if target is None else target.kernels
    integers = options.activations == INTEGERS
    if integers and stored is not None:
        raise UsageError(
            f"`activations={INTEGERS}`: the weights are kept as stored, with a scale per block; omit it, or add "
            "`requantise=True` to quantise them a second time"
        )
    standard = kernels.folds or (options.attention != AUTO and not lowering(options.attention).domains)
    candidates = _fitting(_candidates(standard, integers=integers), options, keep)
    first = candidates[0]
    activations = options.activations or "fp32"
    plan = Plan(bits, options.block_size, options.rounding, kernels, first, keep, activations, stored=stored)
    if target is None:
        return plan
    packings = () if stored is None else tuple(stored.packings())
    product_bits = plan.all_bits if options.searches else plan.multiplied_bits
    probes = _Probes(target, options.computing.dtype, product_bits, packings)
    setting = f"`activations={INTEGERS}`" if integers else f"`precision={options.precision}`"
    plan = probes.with_supported_form(plan, candidates, setting)
    if plan.form is not first:
        note(
            f"{target.provider} does not support {first.summary}; quantised weights are stored for {plan.form.summary}"
        )
    if plan.form.one_scale:
        return plan
    if stored is not None and target.ask is not None:
        fits = [
            size
            for size in stored.blocks()
            if not probes.refusal(plan, "product", [replace(each, block_size=size) for each in packings])
        ]
        plan = replace(plan, stored=replace(stored, sizes=tuple(fits)))
    return replace(plan, kernels=replace(plan.kernels, smaller=probes.smaller_blocks(plan)))


def prefill_plan(options: ExportOptions, target: Target | None, plan: Plan | None) -> Plan | None:
    """The plan of a separate prefill graph with 8-bit integer products; None when none was requested.

    Prefill is compute-bound and a decode step memory-bound: an integer matrix unit is faster for many tokens, and fewer
    bytes are faster for one. Both graphs share one cache. The head and embeddings are those of the decode graph.

    Raises ProviderError when the target has no kernel, e.g. for activations other than float32.
    """
    requested = options.prefill_precision
    if requested is None or plan is None:
        return None
    setting = f"`prefill_precision={requested}`"
    candidates = _candidates(plan.kernels.folds or not plan.form.domains, integers=True)
    # Weights kept unquantised stay so in both graphs; all other bits become those of this form.
    keep = tuple(each if each.bits is None else replace(each, precision=INTEGERS) for each in plan.keep)
    own = Plan(8, None, without_text(plan.quantiser), plan.kernels, candidates[0], keep, INTEGERS)
    if target is None:
        return own
    chosen = _Probes(target, options.computing.dtype, (8,)).with_supported_form(own, candidates, setting)
    return replace(own, form=chosen.form)


def _candidates(standard: bool, *, integers: bool) -> tuple[Form, ...]:
    """Forms to probe, best first. `standard`: ONNX operators first; `integers`: integer products."""
    names = ("matmul_nbits", "dequantize_linear")
    if integers:
        names = ("matmul_integer_to_float", "matmul_integer")
    return tuple(FORMS[name] for name in (reversed(names) if standard else names))


def _fitting(candidates: tuple[Form, ...], options: ExportOptions, keep: tuple[Keep, ...]) -> tuple[Form, ...]:
    """The forms that the requested operator set allows. Raises UsageError when there is none."""
    found = tuple(form for form in candidates if options.opset is None or form.opset <= options.opset)
    if not found:
        first = candidates[0]
        raise UsageError(f"`opset={options.opset}`: quantised weights as {first.summary} need {first.opset} or newer")
    for each in keep:
        if found[0].one_scale and each.bits not in (None, 8):
            raise UsageError(f"`keep={each.pattern}={each.precision}`: {found[0].summary} supports only int8 weights")
    return found


PROBED_WIDTH = 256
"""K and N of probed nodes: a multiple of every block size."""
PROBED_OPSET, PROBED_IR_VERSION = 21, 10
PROBED_SIZES: Mapping[str, tuple[int, ...]] = {"x": (1, 1, PROBED_WIDTH), "ids": (1, 1)}
"""Input shapes of the probes."""


@dataclass(frozen=True, slots=True)
class _Probes:
    """The probes of a target for quantised weights."""

    target: Target
    dtype: str
    """Of the activations."""
    bits: tuple[int, ...]
    """Of the products."""
    stored: tuple[Packing, ...] = ()
    """Packings that keep stored integers."""

    def with_supported_form(self, plan: Plan, candidates: Sequence[Form], setting: str) -> Plan:
        """The plan with the first of `candidates` that the target supports, and its kernels.

        Each is probed with and without zero points, the recorded variant first. Without a probe the record decides.
        `setting`: the option that needs them. Raises ProviderError, which names the operators, when there is no
        kernel for any, or none that computes with quantised weights.
        """
        own, target = plan.kernels, self.target
        if target.ask is None:
            standard = candidates[0].look_up.symmetric  # a Gather of integers, which every provider has
            return replace(plan, form=candidates[0], kernels=replace(own, gather=own.gather or standard))
        refusals = []
        for form in candidates:
            variants = (own,) if form.one_scale else (own, replace(own, symmetric=not own.symmetric))
            for tried in (replace(plan, form=form, kernels=kernels) for kernels in variants):
                reason = self.refusal(tried, "product", self.products(tried))
                if not reason:
                    rows = self.lookups(tried)
                    gather = not self.refusal(tried, "lookup", rows) if rows else own.gather
                    return replace(tried, kernels=replace(tried.kernels, gather=gather))
            refusals.append(f"for {form.product.operator}: {reason}")
        raise ProviderError(
            f"{setting}: {target.provider} has no kernel that computes {self.dtype} activations with quantised "
            f"weights: {'; '.join(refusals)}; nothing was written; choose another `target`, e.g. cpu, or omit {setting}"
        )

    def products(self, plan: Plan) -> list[Packing]:
        """The packings of products, at the probed width."""
        return [*self.stored, *filter(None, (plan.packed(bits, PROBED_WIDTH) for bits in self.bits))]

    def lookups(self, plan: Plan) -> list[Packing]:
        """The packings of embeddings, at the probed width."""
        found = filter(None, (plan.embedding_packing(bits, PROBED_WIDTH) for bits in plan.all_bits))
        return list(dict.fromkeys([*filter(plan.looks_up, self.stored), *found]))

    def smaller_blocks(self, plan: Plan) -> tuple[int, ...]:
        """The block sizes below those of `plan` that the target supports in products and lookups."""
        most = max((plan.block_size or plan.kernels.block_sizes[bits] for bits in plan.all_bits), default=0)
        sizes = tuple(size for size in plan.kernels.smaller if size < most)
        if self.target.ask is None:
            return tuple(size for size in sizes if size in USUAL)

        free = replace(self, stored=())

        def supports(tested: Sequence[int]) -> bool:
            plans = [replace(plan, block_size=size) for size in tested]
            if self.refusal(plan, "product", [each for tried in plans for each in free.products(tried)]):
                return False
            rows = [each for tried in plans for each in free.lookups(tried)] if plan.kernels.gather else []
            return not self.refusal(plan, "lookup", rows)

        return sizes if supports(sizes) else tuple(size for size in sizes if supports([size]))

    def refusal(self, plan: Plan, use: Use, packings: Sequence[Packing]) -> str:
        """Why the target does not run quantised weights in this use; empty where it does, or cannot be probed."""
        if self.target.ask is None or not packings:
            return ""
        model = probe_model(plan, use, packings, to_ir(self.dtype))
        result = self.target.ask(model, PROBED_SIZES)
        if result.failure or result.unsupported:
            return result.failure or f"leaves {', '.join(sorted(result.unsupported))} to another provider"
        if use == "product" and self.target.unpacks is not None and self.target.unpacks(model, PROBED_SIZES):
            return "dequantises the whole matrix in every run on this machine, which is slower than fp32"
        return ""


def probe_model(plan: Plan, use: Use, packings: Sequence[Packing], dtype: ir.DataType) -> bytes:
    """A model with a product or a row lookup for every packing."""
    name, kind = ("x", dtype) if use == "product" else ("ids", ir.DataType.INT64)
    given = ir.Value(name=name, shape=ir.Shape(PROBED_SIZES[name]), type=ir.TensorType(kind))
    opsets = {"": PROBED_OPSET, "com.microsoft": 1}
    graph = ir.Graph([given], [], nodes=[], opset_imports=opsets, name="packed")
    place, form = Place(graph, None, plan.kernels), plan.form
    for index, packing in enumerate(packings):
        if use == "product":
            weight = _zeros(place, f"w{index}", form.product.layout, packing, dtype)
            graph.outputs.append(form.product.write(place, given, None, weight))
        else:
            weight = _zeros(place, f"w{index}", form.look_up.layout, packing, dtype)
            graph.outputs.append(form.look_up.write(place, given, weight))
    return bytes(ir.to_proto(ir.Model(graph, ir_version=PROBED_IR_VERSION)).SerializeToString())


def _zeros(place: Place, name: str, layout: Layout, packing: Packing, dtype: ir.DataType) -> Weight:
    """A weight of zeros; its scales are 1."""
    values = []
    for part in layout.parts(packing, dtype, PROBED_WIDTH, PROBED_WIDTH):
        array = np.ones(part.shape) if part.dtype.is_floating_point() else np.zeros(part.shape)
        tensor = ir.tensor(array.astype(part.dtype.numpy()), dtype=part.dtype)
        values.append(added(place.graph, tensor, part.named(name)))
    return Weight(tuple(values), PROBED_WIDTH, PROBED_WIDTH, packing)
