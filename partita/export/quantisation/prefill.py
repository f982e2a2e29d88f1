"""A graph for prompts alone, beside a decode graph of packed weights: its products are of 8-bit integers on both sides.

A prompt is bound by arithmetic and a step of one token by memory, so what is best for one is not for the other: a
matrix unit for integers multiplies many tokens several times as fast as the kernels for packed weights do, and for one
token those read half the bytes or less. Both graphs write and read one cache. What multiplies only the tokens whose
logits are asked for, as the head, and what is looked up stays as it is in the decode graph, so those bytes are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from partita.errors import ProviderError, UsageError
from partita.export.options import AUTO, INTEGERS, ExportOptions
from partita.export.passes.base import PassContext
from partita.export.quantisation.asking import ASKED_WIDTH, asked_products, settled
from partita.export.quantisation.forms import Form, candidates
from partita.export.quantisation.kernels import Kernels
from partita.export.quantisation.packed import Packed, Packing
from partita.export.quantisation.plan import Plan
from partita.export.quantisation.rewrite import Outcome, Placed, quantise
from partita.export.quantisers import DEFAULT, without_text
from partita.export.target import Target, Times
from partita.export.weight_sources import Plain
from partita.package_records import PrefillChoice, ProductTime
from partita.spelling import spelled

TOKENS = 128
"""Of the products that are timed: a prompt that is worth a graph of its own."""
WORTH = 0.8
"""The second graph is written by itself where its products take at most so much of the time of the first's: it makes
the package larger and its loading longer.
"""
MOST_SIZES = 6
"""Sizes of products that are timed, those with the most weights."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A graph for prompts that was asked for."""

    asked: str
    plan: Plan | None
    """How its own products are packed; None where it cannot be."""
    refused: str = ""
    """Why it cannot be."""
    times: Times | None = None


def make_beside(options: ExportOptions, target: Target | None, plan: Plan | None) -> Beside | None:
    """What was asked for; None when nothing was. Unless what is faster was asked for, raises UsageError for activations
    of another type than float32, and ProviderError when the target has no kernel for it.
    """
    asked = options.prefill_precision
    if asked is None or plan is None:
        return None
    if options.computing.dtype != "float32":
        refused = f"the package computes in {options.computing.dtype} between its products, this graph in float32"
        if asked != AUTO:
            raise UsageError(
                f"{spelled('prefill_precision', asked)}: {refused}; add {spelled('activations', 'fp32')}, or leave it "
                "out"
            )
        return Beside(asked, None, refused)
    forms = candidates(rounds_activations=True, standard=plan.kernels.folds or not plan.form.domains)
    forms = tuple(form for form in forms if options.opset is None or form.opset <= options.opset)
    if not forms:
        refused = f"integers times integers need a newer operator set than {spelled('opset', options.opset)}"
        if asked != AUTO:
            raise UsageError(f"{spelled('prefill_precision', asked)}: {refused}; leave one of the two out")
        return Beside(asked, None, refused)
    # What is to stay as it is stays in both graphs; every other width becomes the one that this form has.
    keep = tuple(each if each.bits is None else replace(each, precision=INTEGERS) for each in plan.keep)
    own = Plan(8, None, without_text(plan.quantiser), plan.kernels, forms[0], keep, INTEGERS)
    if target is None:
        return Beside(asked, own)

    def packings(form: Form, kernels: Kernels) -> list[Packing]:
        found = replace(own, form=form, kernels=kernels).packed(8, ASKED_WIDTH)
        return [] if found is None else [found]

    try:
        option = ("prefill_precision", asked)
        taken, _ = settled(target, forms, packings, packings, options.computing.dtype, option=option)
    except ProviderError as error:
        if asked != AUTO:
            raise
        return Beside(asked, None, str(error))
    return Beside(asked, replace(own, form=taken), times=target.times)


def pack(
    model: ir.Model,
    context: PassContext,
    beside: Plan,
    plan: Plan,
    own: Outcome,
    shared: Outcome,
    movable: Callable[[Plain], bool],
) -> dict[str, int]:
    """Pack the weights of the graph for prompts, in place: those of `beside` into `own`, the others by `plan`, that of
    the decode graph, into `shared`. Returns how many nodes were replaced, by the name of the pass. Raises PassError.
    """
    first = quantise(model, context, beside, own, movable, rest=plan)
    second = quantise(model, context, plan, shared, movable)
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def choose(beside: Beside, plan: Plan, own: Outcome, shared: Outcome) -> PrefillChoice:
    """Whether the graph is to be written, by what its products take, and the record of it without their weights.

    `own`: what its own products would be packed as, `shared`: what those of the decode graph are.
    """
    if beside.plan is None:
        return PrefillChoice(asked=beside.asked, written=False, reason=beside.refused)
    if not own.placed:
        return PrefillChoice(asked=beside.asked, written=False, reason="no product of the model can be packed so")
    timed = () if beside.times is None else _timed(beside.plan, plan, own.placed, shared.placed, beside.times)
    if not timed:
        told = "as asked for" if beside.asked != AUTO else "nothing of the target can be timed here"
        written = beside.asked != AUTO
        return PrefillChoice(asked=beside.asked, written=written, reason=told)
    share = _total(timed, prefill=True) / _total(timed, prefill=False)
    faster = f"its products take {share:.2f} of the time of the decode graph's, for {TOKENS} tokens"
    written = beside.asked != AUTO or share <= WORTH
    limit = "" if beside.asked != AUTO else f"; at most {WORTH} is worth a second graph"
    return PrefillChoice(
        asked=beside.asked,
        written=written,
        reason=f"{faster}{limit}",
        tokens=TOKENS,
        products=timed,
    )


def slower(found: PrefillChoice) -> bool:
    """Whether the products of the graph for prompts take longer than those of the decode graph, as they were timed."""
    return bool(found.products) and _total(found.products, prefill=True) > _total(found.products, prefill=False)


def _total(timed: tuple[ProductTime, ...], *, prefill: bool) -> float:
    """Seconds of all products."""
    return sum(each.weights * (each.prefill_seconds if prefill else each.seconds) for each in timed)


def _timed(
    beside: Plan, plan: Plan, own: Mapping[object, Placed], shared: Mapping[object, Placed], times: Times
) -> tuple[ProductTime, ...]:
    """The products of the graph for prompts, and the same of the decode graph, by size."""
    others = {placed.packed.origin: placed.packed for placed in shared.values()}
    sizes: dict[tuple[int, int, Packing], int] = {}
    for placed in own.values():
        other = others.get(placed.packed.origin)
        if other is not None:
            size = placed.packed.rows, placed.packed.width, _of_width(other)
            sizes[size] = sizes.get(size, 0) + 1
    largest = sorted(sizes.items(), key=lambda entry: -entry[0][0] * entry[0][1] * entry[1])[:MOST_SIZES]
    found = []
    for (rows, width, packing), count in largest:
        integers = beside.packed(8, width)
        assert integers is not None
        questions = [
            (
                asked_products(each.form, each.kernels, [how], "float32", tokens=TOKENS, width=width, rows=rows),
                {"x": (1, TOKENS, width)},
            )
            for each, how in ((plan, packing), (beside, integers))
        ]
        first, second = times(questions)
        found.append(ProductTime(rows=rows, width=width, weights=count, seconds=first, prefill_seconds=second))
    return tuple(found)


def _of_width(packed: Packed) -> Packing:
    """How it is packed, without what only its values need."""
    return replace(packed.packing, quantiser=DEFAULT)
