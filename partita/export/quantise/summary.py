"""Summary of quantised weights for the manifest and the notes of an export."""

from __future__ import annotations

from dataclasses import replace

from partita.export.graph.element_types import of_ir
from partita.export.quantise.plan import Plan
from partita.export.quantise.write.packed import Packed, Packing
from partita.export.quantise.write.rewrite import Outcome
from partita.observations.text_format import human_bytes, plural
from partita.package.records import PackedKind, PackedWeights


def summary(plan: Plan, outcome: Outcome) -> PackedWeights:
    """The manifest record."""
    kinds: dict[Packing, list[Packed]] = {}
    for each in outcome.placed.values():
        whole = plan.form.one_scale and each.packed.layout == plan.form.product.layout
        packing = replace(each.packed.packing, quantiser=each.packed.rounded_by)
        packing = replace(packing, block_size=0) if whole else packing
        kinds.setdefault(packing, []).append(each.packed)
    return PackedWeights(
        kinds=tuple(_kind(packing, weights) for packing, weights in kinds.items()),
        accuracy_level=plan.kernels.accuracy_level,
        form=plan.form.name,
        reads=_reads(plan, outcome),
        activations=plan.activations,
        kept=tuple(f"{keep.pattern}={keep.precision}" for keep in plan.keep),
        not_packed=tuple(not_packed(outcome)),
    )


def _reads(plan: Plan, outcome: Outcome) -> str:
    """The operators that read quantised weights."""
    experts = plan.form.experts if any(each.of_experts for each in outcome.placed.values()) else None
    return plan.form.summary if experts is None else f"{plan.form.summary}, experts by {experts.operator}"


def _kind(packing: Packing, weights: list[Packed]) -> PackedKind:
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
    told = []
    for (operator, kind), weights in sorted(outcome.stayed.items()):
        size = human_bytes(sum(weights.values()) * kind.bitwidth // 8)
        told.append(
            f"{plural(len(weights), 'weight')} that {operator} reads, {size} in {of_ir(kind)}, as {min(weights)}"
        )
    return told


def notes(plan: Plan, outcome: Outcome) -> list[str]:
    """Notes for the user, in sentences."""
    nothing = [] if outcome.placed else [f"no weight of this model can be quantised to int{plan.bits}"]
    nothing += [
        f"`keep`: {name} has {bits} bits anyway: {plan.form.summary} does not support other widths for lookups"
        for name, bits in sorted(outcome.otherwise.items())
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
