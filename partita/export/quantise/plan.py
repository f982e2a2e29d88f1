"""The quantisation plan: precision of the package, and settings of single modules.

The target is probed for a form of quantised weights before the model is traced. A probe contains the nodes that the
form would write, with zero weights. A provider that dequantises the whole matrix in every run, as the CPU provider does
at some levels, counts as one without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from partita.errors import ProviderError, UsageError
from partita.export.options import BLOCK_SIZES, INTEGERS, ExportOptions
from partita.export.passes.base import added
from partita.export.quantise import Keep, check_modules, experts, read_keep
from partita.export.quantise.calibrate import CalibratedWeights
from partita.export.quantise.forms import Form, Place, Weight, candidates
from partita.export.quantise.quantisers import Grid, Packing, without_text
from partita.export.quantise.stored_integers import AsStored
from partita.export.quantise.weight_source import Layout
from partita.export.target import AUTO, Kernels, Target
from partita.export.trace.attention import lowering
from partita.export.weights import to_ir

USUAL = frozenset({32, 64})
"""Smaller blocks that are assumed to be supported without a probe."""


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
        if bits is None or not (self.form.experts and self.kernels.experts):
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


Packings = Callable[[Plan], Sequence[Packing]]
"""The packings that a package may need by a plan."""


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
    as_stored = [] if stored is None else stored.packings()
    product_bits, dtype = plan.calibration_bits if options.searches else plan.multiplied_bits, options.computing.dtype

    def products(tried: Plan) -> list[Packing]:
        return [found for bits in product_bits if (found := tried.packed(bits, PROBED_WIDTH)) is not None]

    def all_products(tried: Plan) -> list[Packing]:
        whole = [replace(each, block_size=PROBED_WIDTH) if tried.form.one_scale else each for each in as_stored]
        return [*whole, *products(tried)]

    def lookups(tried: Plan) -> list[Packing]:
        found = (tried.embedding_packing(bits, PROBED_WIDTH) for bits in plan.calibration_bits)
        return list(dict.fromkeys(filter(None, found)))

    def all_lookups(tried: Plan) -> list[Packing]:
        stored_lookups = (each for each in as_stored if supports_stored_lookup(tried.form, each))
        return list(dict.fromkeys([*stored_lookups, *lookups(tried)]))

    option = ("activations", INTEGERS) if options.activations == INTEGERS else None
    plan = _with_supported_form(target, plan, forms, all_products, all_lookups, dtype, option=option)
    symmetric, form = plan.kernels.symmetric, plan.form
    if symmetric != kernels.symmetric:
        note(f"{target.provider} supports quantised weights {'without' if symmetric else 'with'} zero points only")
    if form is not forms[0]:
        note(f"{target.provider} does not support {forms[0].summary}; quantised weights are stored for {form.summary}")
    if stored is not None and target.ask is not None and not form.one_scale:
        fits = [size for size in stored.blocks() if not _refusal(target, plan, _in_blocks(as_stored, size), dtype)]
        plan = replace(plan, stored=replace(stored, sizes=tuple(fits)))
    if has_experts and plan.kernels.experts and form.experts:
        reason = ""
        if target.ask is not None:
            reason = refusal(target, experts_model(form, plan.kernels, all_products(plan), dtype))
        plan = replace(plan, kernels=replace(plan.kernels, experts=not reason))
        if reason:
            note(f"experts stay floats; {experts.OPERATOR} on {target.provider}: {reason}")
    if form.one_scale:
        return plan
    smaller = _smaller_blocks(target, plan, products, lookups, dtype)
    return replace(plan, kernels=replace(plan.kernels, smaller=smaller))


def _in_blocks(packings: Iterable[Packing], size: int) -> list[Packing]:
    return [replace(each, block_size=size) for each in packings]


def _refusal(target: Target, plan: Plan, packings: Sequence[Packing], dtype: str) -> str:
    """The reason why `target` does not compute products with quantised weights; empty when it does."""
    return refusal(target, product_model(plan.form, plan.kernels, packings, dtype), restores=True)


def _supports_lookups(target: Target, plan: Plan, packings: Sequence[Packing], dtype: str) -> bool:
    """Whether `target` supports row lookups with these packings; by its record where there are none."""
    if not packings:
        return plan.kernels.gather
    return not refusal(target, lookup_model(plan.form, plan.kernels, packings, dtype))


def _with_supported_form(
    target: Target,
    plan: Plan,
    forms: Sequence[Form],
    products: Packings,
    lookups: Packings,
    dtype: str,
    *,
    option: tuple[str, str] | None = None,
) -> Plan:
    """The plan with the first of `forms` that `target` supports with activations of `dtype`, and its kernels.

    Each is probed with and without zero points, the recorded variant first. Without a probe the record decides.
    `option`: the option that requested the forms, where it is not the precision and can be omitted. Raises
    ProviderError, which names the operators, when there is no kernel for any, or none that computes with quantised
    weights.
    """
    own = target.kernels
    if target.ask is None:
        standard = forms[0].look_up.symmetric  # a Gather of integers, which every provider has
        return replace(plan, form=forms[0], kernels=replace(own, gather=own.gather or standard))
    refusals = []
    for form in forms:
        variants = (own,) if form.one_scale else (own, replace(own, symmetric=not own.symmetric))
        for tried in (replace(plan, form=form, kernels=kernels) for kernels in variants):
            reason = _refusal(target, tried, products(tried), dtype)
            if not reason:
                gather = _supports_lookups(target, tried, lookups(tried), dtype)
                return replace(tried, kernels=replace(tried.kernels, gather=gather))
        refusals.append((form, reason))
    first = replace(plan, form=forms[0], kernels=own)
    kinds = list(dict.fromkeys((each.name, each.block_size) for each in products(first)))
    precision, one_scale = kinds[0][0], first.form.one_scale
    weights = " and ".join(f"{name} weights in blocks of {size}" for name, size in kinds)
    weights = f"{precision} weights" if one_scale else weights
    tried_both = "" if one_scale else ", with or without zero points"
    reasons = "; ".join(f"for {form.product.operator}{tried_both}: {reason}" for form, reason in refusals)
    setting, otherwise = f"`precision={precision}`", "a `precision` that it computes in, e.g. fp16"
    if option is not None:
        setting = f"`{option[0]}={option[1]}`"
        otherwise = f"omit {setting}"
    raise ProviderError(
        f"{setting}: {target.provider} has no kernel that computes {dtype} activations with {weights}: "
        f"{reasons}; nothing was written; choose another `target`, e.g. cpu, or {otherwise}"
    )


def _smaller_blocks(target: Target, plan: Plan, products: Packings, lookups: Packings, dtype: str) -> tuple[int, ...]:
    """The block sizes below those of `plan` that `target` supports in products and lookups."""
    most = max((plan.block_size or plan.kernels.block_sizes[bits] for bits in plan.calibration_bits), default=0)
    sizes = tuple(size for size in plan.kernels.smaller if size < most)
    if target.ask is None:
        return tuple(size for size in sizes if size in USUAL)

    def supports(tested: Sequence[int]) -> bool:
        plans = [replace(plan, block_size=size) for size in tested]
        if _refusal(target, plan, [each for tried in plans for each in products(tried)], dtype):
            return False
        rows = [each for tried in plans for each in lookups(tried)] if plan.kernels.gather else []
        return not rows or _supports_lookups(target, plan, rows, dtype)

    return sizes if supports(sizes) else tuple(size for size in sizes if supports([size]))


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

    def packings(tried: Plan) -> list[Packing]:
        found = tried.packed(8, PROBED_WIDTH)
        return [] if found is None else [found]

    chosen = _with_supported_form(target, own, forms, packings, packings, options.computing.dtype, option=option)
    return replace(own, form=chosen.form)


def supports_stored_lookup(form: Form, packing: Packing) -> bool:
    """Whether an embedding with this packing can be looked up in a form."""
    return not form.look_up.symmetric or (packing.grid.symmetric and packing.grid.bits == 8)


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


PROBED_WIDTH = 256
"""K and N of probed nodes: a multiple of every block size."""
RESTORES = "dequantises the whole matrix in every run on this machine, which is slower than fp32"
PROBED_EXPERTS = 4
PROBED_ATTRIBUTES: Mapping[str, str | int | float] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "k": 2,
    "normalize_routing_weights": 1,
}
"""Attributes of probed experts."""
PROBED_OPSET, PROBED_IR_VERSION = 21, 10
PROBED_SIZES: Mapping[str, tuple[int, ...]] = {
    "x": (1, 1, PROBED_WIDTH),
    "ids": (1, 1),
    "hidden": (1, PROBED_WIDTH),
    "scores": (1, PROBED_EXPERTS),
}
"""Input shapes of the probes."""


def refusal(target: Target, model: bytes, *, restores: bool = False) -> str:
    """Why `target` does not run a probe; empty when it does. `restores`: dequantising a whole matrix is a reason."""
    assert target.ask is not None
    result = target.ask(model, PROBED_SIZES)
    if result.failure or result.unsupported:
        return result.failure or f"leaves {', '.join(sorted(result.unsupported))} to another provider"
    return RESTORES if restores and target.unpacks is not None and target.unpacks(model, PROBED_SIZES) else ""


def experts_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with one layer's gated experts for every packing."""
    kind, width = to_ir(dtype), PROBED_WIDTH
    place, hidden = _new_graph("hidden", kind, kernels, PROBED_SIZES["hidden"])
    scores = ir.Value(name="scores", shape=ir.Shape(PROBED_SIZES["scores"]), type=ir.TensorType(kind))
    stack = ir.Value(name="stack", shape=ir.Shape([PROBED_EXPERTS, 2 * width, width]))
    node = ir.node(experts.PLAIN, [hidden, scores, stack], attributes=dict(PROBED_ATTRIBUTES), domain=experts.DOMAIN)
    place.graph.inputs.append(scores)
    made = []
    for index, packing in enumerate(packings):
        up, down = (
            _zeros(place, f"w{index}.{rows}", form.product.layout, packing, kind, rows, width)
            for rows in (2 * PROBED_EXPERTS * width, PROBED_EXPERTS * width)
        )
        made.append(experts.write(place, node, up, down))
    return _serialised(place, made)


def product_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with products of x [1, 1, width] and weights [width, width] of every packing."""
    place, hidden = _new_graph("x", to_ir(dtype), kernels, PROBED_SIZES["x"])
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.product.layout, packing, to_ir(dtype), PROBED_WIDTH, PROBED_WIDTH)
        made.append(form.product.write(place, hidden, None, weight))
    return _serialised(place, made)


def lookup_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with a row lookup for every packing."""
    place, ids = _new_graph("ids", ir.DataType.INT64, kernels, PROBED_SIZES["ids"])
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.look_up.layout, packing, to_ir(dtype), PROBED_WIDTH, PROBED_WIDTH)
        made.append(form.look_up.write(place, ids, weight))
    return _serialised(place, made)


def _new_graph(name: str, dtype: ir.DataType, kernels: Kernels, shape: tuple[int, ...]) -> tuple[Place, ir.Value]:
    """A graph with one input, and a place at its end."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": PROBED_OPSET, "com.microsoft": 1}, name="packed")
    return Place(graph, None, kernels), value


def _zeros(
    place: Place, name: str, layout: Layout, packing: Packing, dtype: ir.DataType, rows: int, width: int
) -> Weight:
    """A weight of zeros; its scales are 1."""
    values = []
    for part in layout.parts(packing, dtype, rows, width):
        array = np.ones(part.shape) if part.dtype.is_floating_point() else np.zeros(part.shape)
        tensor = ir.tensor(array.astype(part.dtype.numpy()), dtype=part.dtype)
        values.append(added(place.graph, tensor, f"{name}.{part.label}" if part.label else name))
    return Weight(tuple(values), rows, width, packing)


def _serialised(place: Place, outputs: Sequence[ir.Value]) -> bytes:
    """The serialised model, with names for all nodes and values."""
    for index, node in enumerate(place.graph):
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            value.name = f"{node.name}.output"
    place.graph.outputs.extend(outputs)
    return bytes(ir.to_proto(ir.Model(place.graph, ir_version=PROBED_IR_VERSION)).SerializeToString())
