"""Replace weights of a graph by quantised ones, after the passes.

    x ─ MatMul(W [K, N]) ─ y
    x ─ Gemm(W [N, K], transB=1, c) ─ y
    ids ─ Gather(E [V, H]) ─ e
    x, scores ─ MoE(up [E, F, H], down [E, H, I]) ─ y

become the operators of the plan's form (`forms/`). A tied embedding and head share bytes where their layouts match. A
stack of experts that a MatMul or Gemm reads as one matrix counts as a weight. Routers stay unquantised, because
rounding them sends tokens to other experts. A note lists the weights that no quantisable node reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields

import onnx_ir as ir

from partita.export.passes.base import Pass, TracedGraph, drop_unused_initializers, replace
from partita.export.passes.cleaning import MODULE
from partita.export.passes.manager import run as run_passes
from partita.export.quantise import Keep, experts, paths
from partita.export.quantise.forms import Place, Weight
from partita.export.quantise.plan import Plan
from partita.export.quantise.products import (
    reordered,
    routes,
    stored_packing,
    views_around,
    weight_of_product,
)
from partita.export.quantise.quantisers import Packing
from partita.export.quantise.stored_integers import StoredPacking, is_stored
from partita.export.quantise.weight_source import Layout, QuantisedSource
from partita.export.weights import of_ir
from partita.export.weights.origins import ReorderedOrigin
from partita.export.weights.sources import FloatSource, initializers, weight_part
from partita.observations.text_format import human_bytes, plural
from partita.package.records import PackedKind, PackedWeights

VERSION = 1
"""Version of the operator sets of quantised weights."""
SMALL_ELEMENTS = 1 << 12
"""Unquantised weights with fewer elements are not reported."""
AFTER_HEAD = 10
"""Maximum nodes between a head's product and the logits."""
AFTER = frozenset({"Reshape", "Cast", "Add", "Sub", "Mul", "Div", "Tanh", "Where", "Clip", "Identity", "Transpose"})
"""Operators that may be between them."""


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A quantised weight in the graphs."""

    packed: QuantisedSource
    modules: tuple[str, ...]
    """Modules of the nodes that read it."""
    values: tuple[ir.Value, ...]
    """Integers, scales and zero points."""
    of_experts: bool = False
    """An operator on experts reads it, with another stack of the same packing."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A weight that is stored in 16 bits and computed in float32."""

    tensors: frozenset[str]
    modules: tuple[str, ...]
    """Modules of the weight: the nodes that read it, and those of its parameters."""
    dtype: str


@dataclass(slots=True)
class Outcome:
    """The outcome of quantisation for all graphs of a package."""

    placed: dict[object, PlacedWeight] = field(default_factory=dict)
    """Weight key -> the quantised weight."""
    kept_by_setting: dict[str, int] = field(default_factory=dict)
    """Weights of modules that a setting keeps unquantised -> number of elements."""
    unquantised: dict[tuple[str, ir.DataType], dict[str, int]] = field(default_factory=dict)
    """(operator, dtype) -> other unquantised weights with their number of elements."""
    lookup_bits: dict[str, int] = field(default_factory=dict)
    """Embeddings whose setting requests bits that the form does not look up -> their bits."""
    half_precision: dict[object, Narrowed] = field(default_factory=dict)
    """Weight key -> weights rounded to 16 bits and stored in them."""
    modules: set[str] = field(default_factory=set)
    """Modules of all weights that could be quantised."""
    kept_for_selection: frozenset[str] = frozenset()
    """Checkpoint tensors that stay because a graph selects matrices from them."""


def quantise(
    traced: TracedGraph,
    plan: Plan,
    outcome: Outcome,
    movable: Callable[[FloatSource], bool],
    *,
    rest: Plan | None = None,
) -> dict[str, int]:
    """Quantise the weights of a graph by `plan`, in place: changes per pass. Raises PassError.

    `rest`: a plan that runs afterwards: now only products that it would quantise, too, except the head. `movable`:
    whether the source model can get the same rounded weight, without which the graph cannot be verified.
    """

    def run(traced: TracedGraph) -> int:
        count = _Rewriter(traced.graph, traced, plan, outcome, movable, rest).run()
        for domain in plan.form.domains if count else ():
            traced.model.opset_imports.setdefault(domain, VERSION)
        return count

    return run_passes(traced, (Pass("packed_weights", run),))


def without_weights(keep: Sequence[Keep], outcome: Outcome) -> list[Keep]:
    """Settings whose modules have no weight that could be quantised."""
    narrowed = {module for each in outcome.half_precision.values() for module in each.modules}
    return [each for each in keep if not any(each.fits(module) for module in outcome.modules | narrowed)]


@dataclass(slots=True)
class _Rewriter:
    """The state of rewriting one graph."""

    graph: ir.Graph
    traced: TracedGraph
    plan: Plan
    outcome: Outcome
    movable: Callable[[FloatSource], bool]
    rest: Plan | None = None
    """The plan that runs afterwards."""
    values: dict[object, tuple[ir.Value, ...]] = field(default_factory=dict)
    """Weight key -> its values in this graph."""
    shared: dict[tuple[str, object], tuple[ir.Value, ...]] = field(default_factory=dict)
    """Values shared by products of this graph."""

    def run(self) -> int:
        """Replace every node that reads a weight to quantise; returns their number."""
        tokens = self.traced.input("tokens")
        heads: dict[str, Packing] = {}
        count = 0
        for node in list(self.graph):
            count += self._experts(node)
            plain = weight_of_product(node)
            later = plain is not None and self.rest is not None and self._is_for(self.rest, node, plain)
            if plain is not None and not routes(node) and not later:
                found = self._packing(node, plain)
                if found is not None:
                    heads[_tensor(plain)] = found.packing
                    layout = self.plan.form.product.layout
                    self._product(node, self._quantised_weight(plain, found, layout))
                    count += 1
        for node in list(self.graph) if self.rest is None else ():
            count += self._replace_lookup(node, tokens, heads)
        self._settle_values()
        drop_unused_initializers(self.graph)
        if self.rest is None:
            self._count_unquantised()
        return count

    def _is_for(self, rest: Plan, node: ir.Node, plain: FloatSource) -> bool:
        """Whether a product is left to the plan that runs afterwards: one that stays a float there, or the head."""
        if rest.packing(modules_of(node, plain), plain.origin.shape[1]) is None:
            return True
        logits = {port.name for port in self.traced.outputs if port.role == "logits"}
        near = [node]
        for _ in range(AFTER_HEAD):
            values = [value for each in near for value in each.outputs]
            if any(value.name in logits for value in values):
                return True
            near = [use.node for value in values for use in value.uses() if use.node.op_type in AFTER]
        return False

    def _packing(self, node: ir.Node, plain: FloatSource, *, embedding: bool = False) -> StoredPacking | None:
        """The packing of the weight of `node`; None where it stays. Raises UnsupportedModelError, UsageError."""
        if not self._may_be_quantised(plain):
            return None
        where = modules_of(node, plain)
        self.outcome.modules.update(where)
        if self.plan.kept_by_setting(where):
            self.outcome.kept_by_setting[plain.name] = plain.elements
        elif self._keeps_stored(where, plain):
            return stored_packing(self.plan, where, (plain,), "lookup" if embedding else "product")
        setting = self.plan.setting(where)
        packing = self.plan.packing(where, plain.origin.shape[1], embedding=embedding)
        if packing is not None and setting is not None and setting.bits not in (None, packing.grid.bits):
            self.outcome.lookup_bits[plain.name] = packing.grid.bits
        return None if packing is None else StoredPacking(packing, (plain.origin,))

    def _keeps_stored(self, where: Sequence[str], *weights: FloatSource) -> bool:
        """Whether the stored integers of some weights are to be kept."""
        if self.plan.stored is None or self.plan.kept_by_setting(where):
            return False
        return any(is_stored(plain.origin) for plain in weights)

    def _quantised_weight(
        self, plain: FloatSource, chosen: StoredPacking, layout: Layout, place: int = 0
    ) -> QuantisedSource:
        """The weight with this packing."""
        return QuantisedSource.of(
            replace_fields(plain, origin=chosen.origins[place]), chosen.packing, layout, self.plan.rounded
        )

    def _may_be_quantised(self, plain: FloatSource) -> bool:
        """Whether the weight can be verified and is stored once."""
        return not plain.tensors & self.outcome.kept_for_selection and self.movable(plain)

    def _experts(self, node: ir.Node) -> bool:
        """Replace MoE by the form's operator on quantised experts; False where that is impossible."""
        found = experts.stacks(node)
        if found is None or not self.plan.form.experts or not all(map(self._may_be_quantised, found)):
            return False
        where = modules_of(node, found[0])
        self.outcome.modules.update(where)
        if self.plan.kept_by_setting(where):
            self.outcome.kept_by_setting |= {plain.name: plain.elements for plain in found}
        if self._keeps_stored(where, *found):
            chosen = stored_packing(self.plan, where, found, "experts")
        else:
            packing = self.plan.experts(where, [plain.origin.shape[1] for plain in found])
            chosen = None if packing is None else StoredPacking(packing, tuple(plain.origin for plain in found))
        if chosen is None:
            return False
        up, down = (
            self._weight(
                self._quantised_weight(plain, chosen, self.plan.form.product.layout, place), node, of_experts=True
            )
            for place, plain in enumerate(found)
        )
        place = Place(self.graph, node, self.plan.kernels, self.shared)
        self._replace(node, experts.write(place, node, up, down))
        return True

    def _product(self, node: ir.Node, packed: QuantisedSource) -> None:
        """Replace a MatMul or Gemm by the product of the form."""
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        views = views_around(node)
        hidden = node.inputs[0] if views is None else views[0].inputs[0]
        assert hidden is not None
        place = Place(self.graph, node, self.plan.kernels, self.shared)
        if isinstance(packed.origin, ReorderedOrigin):
            hidden = reordered(place, hidden, packed.origin.order)
        made = self.plan.form.product.write(place, hidden, bias, self._weight(packed, node))
        if views is None:
            self._replace(node, made)
        else:
            self._replace(views[1], made, dead=(node, views[0]))

    def _replace_lookup(self, node: ir.Node, tokens: ir.Value | None, heads: dict[str, Packing]) -> bool:
        """Replace the Gather of an embedding by the form's lookup; False where it is not one."""
        form = self.plan.form
        if node.op_type != "Gather" or node.inputs[1] is not tokens or node.attributes.get_int("axis", 0) != 0:
            return False
        weight = weight_part(node.inputs[0])
        if weight is None or weight.shape.rank() != 2 or weight.is_reshaped:
            return False
        if not isinstance(weight.source, FloatSource):
            return False
        found = self._packing(node, weight.source, embedding=True)
        own_setting = self.plan.setting([node.metadata_props.get(MODULE, "")])
        if found is not None and own_setting is None and form.look_up.layout == form.product.layout:
            # tied: the bytes of the head
            found = replace_fields(found, packing=heads.get(_tensor(weight.source), found.packing))
        if found is None or not self.plan.kernels.gather or weight.source.origin.shape[1] % found.packing.block_size:
            return False
        packed = self._quantised_weight(weight.source, found, form.look_up.layout)
        assert tokens is not None
        place = Place(self.graph, node, self.plan.kernels, self.shared)
        self._replace(node, form.look_up.write(place, tokens, self._weight(packed, node)))
        return True

    def _replace(self, node: ir.Node, value: ir.Value, dead: tuple[ir.Node, ...] = ()) -> None:
        """Replace the output of `node` by `value`, and remove dead nodes of `dead`."""
        new = value.producer()
        assert new is not None
        replace(self.graph, node, new, dead)

    def _weight(self, packed: QuantisedSource, node: ir.Node, *, of_experts: bool = False) -> Weight:
        """A weight for node writers, with initializers created once per graph."""
        key, module = packed.key, node.metadata_props.get(MODULE, "")
        if key not in self.values:
            name = f"{packed.name}.{packed.packing.name}"
            if name in self.graph.initializers:  # a tied embedding with another layout than the head
                name = f"{name}.rows"
            self.values[key] = initializers(packed, name)
            for value in self.values[key]:
                assert value.name is not None
                self.graph.initializers[value.name] = value
        known = self.outcome.placed.get(key)
        modules = () if known is None else known.modules
        values = self.values[key] if known is None else known.values
        self.outcome.placed[key] = PlacedWeight(packed, tuple(dict.fromkeys([*modules, module])), values, of_experts)
        return Weight(self.values[key], packed.rows, packed.width, packed.packing)

    def _settle_values(self) -> None:
        """Set the values of each weight to its used initializers: a form may have reshaped the bytes."""
        read = {
            part.key: value
            for value in self.graph.initializers.values()
            if value.uses() and (part := weight_part(value))
        }
        for key in self.values:
            placed = self.outcome.placed[key]
            values = tuple(
                value if value.uses() or (part := weight_part(value)) is None else read.get(part.key, value)
                for value in placed.values
            )
            self.outcome.placed[key] = replace_fields(placed, values=values)

    def _count_unquantised(self) -> None:
        """Count the unquantised weights by consumer."""
        for value in self.graph.initializers.values():
            weight = weight_part(value)
            if weight is None or not isinstance(weight.source, FloatSource) or weight.shape.rank() < 2:
                continue
            name = weight.source.name
            if self.plan.stored is not None and not is_stored(weight.source.origin):
                continue  # floats of a checkpoint whose integers are kept
            if weight.source.elements < SMALL_ELEMENTS or name in self.outcome.kept_by_setting:
                continue
            operator = next((use.node.op_type for use in value.uses()), "nothing")
            self.outcome.unquantised.setdefault((operator, weight.source.dtype), {})[name] = weight.source.elements


def modules_of(node: ir.Node, plain: FloatSource) -> list[str]:
    """The modules of a node and of its weight, as `--keep` names them. Both stacks of an operator on experts count."""
    owners = experts.stacks(node) or (plain,)
    return [node.metadata_props.get(MODULE, ""), *(path for each in owners for path in paths(each.parameters))]


def _tensor(plain: FloatSource) -> str:
    """The checkpoint tensors of a weight, as one name."""
    return " ".join(sorted(plain.tensors))


def summary(plan: Plan, outcome: Outcome) -> PackedWeights:
    """The manifest record."""
    kinds: dict[Packing, list[QuantisedSource]] = {}
    for each in outcome.placed.values():
        whole = plan.form.one_scale and each.packed.layout == plan.form.product.layout
        packing = replace_fields(each.packed.packing, quantiser=each.packed.quantiser)
        packing = replace_fields(packing, block_size=0) if whole else packing
        kinds.setdefault(packing, []).append(each.packed)
    has_experts = any(each.of_experts for each in outcome.placed.values())
    by_experts = f", experts by {experts.OPERATOR}" if has_experts else ""
    return PackedWeights(
        kinds=tuple(_kind(packing, weights) for packing, weights in kinds.items()),
        accuracy_level=plan.kernels.accuracy_level,
        form=plan.form.name,
        operators=f"{plan.form.summary}{by_experts}",
        activations=plan.activations,
        keep=tuple(f"{keep.pattern}={keep.precision}" for keep in plan.keep),
        not_packed=tuple(not_packed(outcome)),
    )


def _kind(packing: Packing, weights: list[QuantisedSource]) -> PackedKind:
    """The record of weights with one packing; block size 0 is a whole row."""
    return PackedKind(
        precision=packing.name,
        block_size=packing.block_size,
        zero_points=not packing.grid.symmetric,
        quantiser=packing.quantiser,
        weights=len(weights),
        parameters=sum(weight.elements for weight in weights),
        size_bytes=sum(part.size_bytes for weight in weights for part in weight.parts),
    )


def not_packed(outcome: Outcome) -> list[str]:
    """Weights that stay unquantised without a setting, one phrase per operator that reads them."""
    notes = []
    for (operator, kind), weights in sorted(outcome.unquantised.items()):
        size = human_bytes(sum(weights.values()) * kind.bitwidth // 8)
        notes.append(
            f"{plural(len(weights), 'weight')} that {operator} reads, {size} in {of_ir(kind)}, as {min(weights)}"
        )
    return notes


def notes(plan: Plan, outcome: Outcome) -> list[str]:
    """Notes for the user, in sentences."""
    nothing = [] if outcome.placed else [f"no weight of this model can be quantised to int{plan.bits}"]
    nothing += [
        f"`keep`: {name} has {bits} bits anyway: {plan.form.summary} does not support other widths for lookups"
        for name, bits in sorted(outcome.lookup_bits.items())
    ]
    return [*nothing, *_smaller_blocks(plan, outcome), *(f"not quantised: {phrase}" for phrase in not_packed(outcome))]


def _smaller_blocks(plan: Plan, outcome: Outcome) -> list[str]:
    """A sentence for each block size that is smaller than requested."""
    widths: dict[int, list[int]] = {}
    for each in outcome.placed.values():
        size = each.packed.packing.block_size
        if plan.block_size is not None and size < plan.block_size:
            widths.setdefault(size, []).append(each.packed.width)
    return [
        f"`block_size={plan.block_size}` does not divide rows of "
        f"{', '.join(map(str, sorted(set(found))))}: {plural(len(found), 'weight')} in blocks of {size}"
        for size, found in sorted(widths.items(), reverse=True)
    ]
