"""Replace weights of a graph by quantised ones, after the passes.

    x ─ MatMul(W [K, N]) ─ y
    x ─ Gemm(W [N, K], transB=1, c) ─ y
    ids ─ Gather(E [V, H]) ─ e
    x, scores ─ MoE(up [E, F, H], down [E, H, I]) ─ y

become the operators of the plan's form (`forms.py`). A tied embedding and head share bytes where their layouts match. A
stack of experts that a MatMul or Gemm reads as one matrix counts as a weight. Routers stay unquantised, because
rounding them sends tokens to other experts. A note lists the weights that no quantisable node reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields

import onnx_ir as ir

from partita.export.passes.base import Pass, TracedGraph, added, drop_unused_initializers, replace
from partita.export.passes.cleaning import MODULE
from partita.export.passes.manager import run as run_passes
from partita.export.quantise import Packing, paths
from partita.export.quantise.forms import EXPERTS, Place, Weight, write_experts
from partita.export.quantise.plan import Plan, Use
from partita.export.quantise.products import (
    expert_stacks,
    reordered,
    routes,
    stored_packing,
    views_around,
    weight_of_product,
)
from partita.export.quantise.stored_integers import is_stored
from partita.export.quantise.weight_source import Layout, QuantisedSource
from partita.export.weights import of_ir
from partita.export.weights.origins import ReorderedOrigin
from partita.export.weights.sources import FloatSource, StoredPart, weight_part
from partita.observations.text_format import human_bytes, plural
from partita.package.records import PackedKind, PackedWeights

VERSION = 1
"""Version of the operator sets of quantised weights."""
SMALL_ELEMENTS = 1 << 12
"""Unquantised weights with fewer elements are not reported."""


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

    packed: FloatSource
    modules: tuple[str, ...]
    """Modules of the nodes that read it, as `modules_of`."""


@dataclass(slots=True)
class Outcome:
    """The outcome of quantisation for all graphs of a package."""

    placed: dict[object, PlacedWeight] = field(default_factory=dict)
    """Weight key -> the quantised weight."""
    kept_by_setting: dict[str, int] = field(default_factory=dict)
    """Weights of modules that a setting keeps unquantised -> number of elements."""
    unquantised: dict[tuple[str, ir.DataType], dict[str, int]] = field(default_factory=dict)
    """(operator, dtype) -> other unquantised weights with their number of elements."""
    half_precision: dict[object, Narrowed] = field(default_factory=dict)
    """Weight key -> weights rounded to 16 bits and stored in them."""
    modules: set[str] = field(default_factory=set)
    """Modules of all weights that could be quantised, or are stored in 16 bits by a setting."""
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
    shared: dict[Hashable, tuple[ir.Value, ...]] = field(default_factory=dict)
    """Values shared by products of this graph."""

    def run(self) -> int:
        """Replace every node that reads a weight to quantise; returns their number."""
        tokens = self.traced.input("tokens")
        heads: dict[frozenset[str], Packing] = {}
        head = next((node for node in reversed(self.graph) if weight_of_product(node) is not None), None)
        count, rest = 0, self.rest
        for node in list(self.graph):
            count += self._experts(node)
            plain = weight_of_product(node)
            if plain is None or routes(node):
                continue
            if rest is not None and (
                node is head or rest.packing(modules_of(node, plain), plain.origin.shape[1]) is None
            ):
                continue  # `rest` quantises the head, and leaves other weights as they are
            found = self._quantised(node, (plain,), "product", self.plan.form.product.layout)
            if found is not None:
                heads[plain.tensors] = found[0].packing
                self._product(node, found[0])
                count += 1
        for node in list(self.graph) if rest is None else ():
            count += self._replace_lookup(node, tokens, heads)
        drop_unused_initializers(self.graph)
        self._settle_values()
        if rest is None:
            self._count_unquantised()
        return count

    def _quantised(
        self, node: ir.Node, weights: Sequence[FloatSource], use: Use, layout: Layout
    ) -> list[QuantisedSource] | None:
        """The quantised weights of `node`; None where they stay floats. Raises UnsupportedModelError, UsageError."""
        plan, outcome = self.plan, self.outcome
        if any(plain.tensors & outcome.kept_for_selection or not self.movable(plain) for plain in weights):
            return None
        where = modules_of(node, weights[0])
        outcome.modules.update(where)
        origins = tuple(plain.origin for plain in weights)
        setting = plan.setting(where)
        if setting is not None and setting.bits is None:
            outcome.kept_by_setting |= {plain.name: plain.elements for plain in weights}
            return None
        if plan.stored is not None and any(map(is_stored, origins)):
            found = stored_packing(plan, where, weights, use)
        else:
            packing = plan.packing(where, *(origin.shape[1] for origin in origins), use=use)
            found = None if packing is None else (packing, origins)
        return found and [
            QuantisedSource.of(replace_fields(plain, origin=origin), found[0], layout, rounded=plan.rounded)
            for plain, origin in zip(weights, found[1], strict=True)
        ]

    def _experts(self, node: ir.Node) -> bool:
        """Replace MoE by the form's operator on quantised experts; False where that is impossible."""
        stacks = expert_stacks(node)
        if stacks is None or not self.plan.form.experts:
            return False
        found = self._quantised(node, stacks, "experts", self.plan.form.product.layout)
        if found is None:
            return False
        up, down = (self._weight(packed, node, of_experts=True) for packed in found)
        place = Place(self.graph, node, self.plan.kernels, self.shared)
        self._replace(node, write_experts(place, node, up, down))
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
        self._replace(node if views is None else views[1], made)

    def _replace_lookup(self, node: ir.Node, tokens: ir.Value | None, heads: dict[frozenset[str], Packing]) -> bool:
        """Replace the Gather of an embedding by the form's lookup; False where it is not one."""
        form = self.plan.form
        if node.op_type != "Gather" or node.inputs[1] is not tokens or node.attributes.get_int("axis", 0) != 0:
            return False
        weight = weight_part(node.inputs[0])
        if weight is None or weight.shape.rank() != 2 or weight.is_reshaped:
            return False
        plain = weight.source
        found = None
        if isinstance(plain, FloatSource):
            found = self._quantised(node, (plain,), "lookup", form.look_up.layout)
        if found is None:
            return False
        (packed,) = found
        own_setting = self.plan.setting([node.metadata_props.get(MODULE, "")])
        if own_setting is None and form.look_up.layout == form.product.layout:  # tied: the bytes of the head
            packed = replace_fields(packed, packing=heads.get(plain.tensors, packed.packing))
        if not self.plan.kernels.gather or packed.width % packed.packing.block_size:
            return False
        assert tokens is not None
        place = Place(self.graph, node, self.plan.kernels, self.shared)
        self._replace(node, form.look_up.write(place, tokens, self._weight(packed, node)))
        return True

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        """Replace the output of `node` by `value`."""
        new = value.producer()
        assert new is not None
        replace(self.graph, node, new)

    def _weight(self, packed: QuantisedSource, node: ir.Node, *, of_experts: bool = False) -> Weight:
        """A weight for node writers, with initializers created once per graph."""
        key, module = packed.key, node.metadata_props.get(MODULE, "")
        if key not in self.values:
            name = f"{packed.name}.{packed.packing.name}"
            if name in self.graph.initializers:  # a tied embedding with another layout than the head
                name = f"{name}.rows"
            parts = [StoredPart(packed, index) for index in range(len(packed.parts))]
            self.values[key] = tuple(added(self.graph, each, each.part.named(name)) for each in parts)
        known = self.outcome.placed.get(key)
        modules = () if known is None else known.modules
        values = self.values[key] if known is None else known.values
        self.outcome.placed[key] = PlacedWeight(packed, tuple(dict.fromkeys([*modules, module])), values, of_experts)
        return Weight(self.values[key], packed.rows, packed.width, packed.packing)

    def _settle_values(self) -> None:
        """Set the values of each weight to its used initializers: a form may have reshaped the bytes."""
        read = {part.key: value for value in self.graph.initializers.values() if (part := weight_part(value))}
        for key in self.values:
            placed = self.outcome.placed[key]
            values = tuple(read[part.key] if (part := weight_part(value)) else value for value in placed.values)
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
    owners = expert_stacks(node) or (plain,)
    return [node.metadata_props.get(MODULE, ""), *(path for each in owners for path in paths(each.parameters))]


def summary(plan: Plan, outcome: Outcome) -> PackedWeights:
    """The manifest record."""
    kinds: dict[Packing, list[QuantisedSource]] = {}
    for each in outcome.placed.values():
        whole = plan.form.one_scale and each.packed.layout == plan.form.product.layout
        size = 0 if whole else each.packed.packing.block_size  # 0: a whole row
        packing = replace_fields(each.packed.packing, quantiser=each.packed.quantiser, block_size=size)
        kinds.setdefault(packing, []).append(each.packed)
    has_experts = any(each.of_experts for each in outcome.placed.values())
    return PackedWeights(
        kinds=tuple(
            PackedKind(
                precision=packing.name,
                block_size=packing.block_size,
                zero_points=not packing.grid.symmetric,
                quantiser=packing.quantiser,
                weights=len(weights),
                parameters=sum(weight.elements for weight in weights),
                size_bytes=sum(part.size_bytes for weight in weights for part in weight.parts),
            )
            for packing, weights in kinds.items()
        ),
        accuracy_level=plan.kernels.accuracy_level,
        form=plan.form.name,
        operators=f"{plan.form.summary}{f', experts by {EXPERTS}' if has_experts else ''}",
        activations=plan.activations,
        keep=tuple(f"{keep.pattern}={keep.precision}" for keep in plan.keep),
        not_packed=tuple(not_packed(outcome)),
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
