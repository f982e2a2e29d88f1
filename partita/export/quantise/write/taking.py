"""Packing of weights that keep their stored integers, and the reordering of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from partita.errors import UnsupportedModelError, UsageError
from partita.export.quantise.forms import Place
from partita.export.quantise.plan import Plan, looks_up_stored
from partita.export.quantise.write.as_stored import AsStored, NotAsStoredError, Taken
from partita.export.weights.origins import Reordered
from partita.export.weights.sources import Plain

ORDERED = "ordered"
PACKED_ATTENTION = "packed_attention"
"""The pass that joins the query, key and value projections."""


def taken_by_product(plan: Plan, modules: Iterable[str], plain: Plain) -> Taken:
    """The packing of a product's weight.

    Raises UnsupportedModelError where it cannot be packed as stored, UsageError where a setting contradicts.
    """
    stored, form = _of(plan), plan.form
    try:
        taken = stored.take([plain.origin], whole_rows=form.one_scale)
        grid = taken.packing.grid
        if form.one_scale and not (grid.symmetric and grid.bits in form.bits):
            raise NotAsStoredError(f"{form.summary} supports only 8 bits without zero points")
    except NotAsStoredError as error:
        apart = ""
        if len(plain.tensors) > 1:
            apart = f"; `without_pass={PACKED_ATTENTION}` keeps queries, keys and values apart"
        raise UnsupportedModelError(
            f"{plain.checkpoint.where}: {plain.name} cannot be stored unchanged: {error}{apart}; {_instead()}"
        ) from error
    _check_said(plan, modules, plain, taken)
    return taken


def _check_said(plan: Plan, modules: Iterable[str], plain: Plain, taken: Taken) -> None:
    """Raise UsageError where a setting requests other bits than the stored ones."""
    said, bits = plan.bits_said(modules), taken.packing.grid.bits
    if said is not None and said != bits:
        raise UsageError(
            f"`keep`: {plain.name} is stored in {bits} bits, and would be quantised a second time; add "
            "`requantise=True`, or omit it"
        )


def taken_by_look_up(plan: Plan, modules: Iterable[str], plain: Plain) -> Taken | None:
    """The packing of an embedding; None where it stays floats, because its form does not look up these integers."""
    try:
        taken = _of(plan).take([plain.origin])
    except NotAsStoredError:
        return None
    _check_said(plan, modules, plain, taken)
    reordered_rows = any(isinstance(origin, Reordered) for origin in taken.origins)
    return None if reordered_rows or not looks_up_stored(plan.form, taken.packing) else taken


def taken_by_experts(plan: Plan, modules: Iterable[str], weights: Sequence[Plain]) -> Taken | None:
    """The packing of one layer's stacks for one operator; None where it does not support them."""
    if plan.form.experts is None or not plan.kernels.experts:
        return None
    try:
        taken = _of(plan).take([plain.origin for plain in weights])
    except NotAsStoredError as error:
        raise UnsupportedModelError(
            f"{weights[0].checkpoint.where}: {weights[0].name} and {weights[1].name} cannot be stored "
            f"unchanged: {error}; {_instead()}"
        ) from error
    _check_said(plan, modules, weights[0], taken)
    return None if any(isinstance(origin, Reordered) for origin in taken.origins) else taken


def reordered(place: Place, hidden: ir.Value, order: tuple[int, ...]) -> ir.Value:
    """Activations [..., K] with column `order[i]` at i; shared by all products with that order."""
    key = (ORDERED, (hidden, order))
    if key not in place.shared:
        number = sum(1 for word, _ in place.shared if word == ORDERED)
        index = place.constant(np.array(order, np.int64), f"columns.{number}")
        made = place.node("Gather", [hidden, index], dtype=hidden.dtype, shape=hidden.shape, attributes={"axis": -1})
        place.shared[key] = (made,)
    return place.shared[key][0]


def _instead() -> str:
    """The remedy for a weight that cannot be packed as stored."""
    return (
        "add `requantise=True` to quantise the weights a second time, or set `precision` to fp16 or bf16 "
        "to keep their values"
    )


def _of(plan: Plan) -> AsStored:
    assert plan.stored is not None
    return plan.stored
