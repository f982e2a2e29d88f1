"""A graph for prompts alone, beside a decode graph of packed weights: its products are of 8-bit integers on both sides.

A prompt is bound by arithmetic and a step of one token by memory, so what is best for one is not for the other: a
matrix unit for integers multiplies many tokens several times as fast as the kernels for packed weights do, and for one
token those read half the bytes or less. Both graphs write and read one cache. What multiplies only the tokens whose
logits are asked for, as the head, and what is looked up stays as it is in the decode graph, so those bytes are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from partita.errors import UsageError
from partita.export.options import INTEGERS, ExportOptions
from partita.export.passes.base import PassContext
from partita.export.quantise.asking import ASKED_WIDTH, settled
from partita.export.quantise.forms import Form, candidates
from partita.export.quantise.plan import Plan
from partita.export.quantise.rounders import without_text
from partita.export.quantise.write.kernels import Kernels
from partita.export.quantise.write.packed import Packing
from partita.export.quantise.write.rewrite import Outcome, quantise
from partita.export.target import Target
from partita.export.weights.sources import Plain


def prefill_plan(options: ExportOptions, target: Target | None, plan: Plan | None) -> Plan | None:
    """How the products of a graph for prompts are packed; None when no such graph was asked for.

    Raises UsageError for activations of another type than float32, and ProviderError when the target has no kernel.
    """
    asked = options.prefill_precision
    if asked is None or plan is None:
        return None
    option = ("prefill_precision", asked)
    if options.computing.dtype != "float32":
        raise UsageError(
            f"`prefill_precision={asked}`: the package computes in {options.computing.dtype} between its products, "
            "this graph in float32; add `activations=fp32`, or leave it out"
        )
    forms = candidates(rounds_activations=True, standard=plan.kernels.folds or not plan.form.domains)
    # What is to stay as it is stays in both graphs; every other width becomes the one that this form has.
    keep = tuple(each if each.bits is None else replace(each, precision=INTEGERS) for each in plan.keep)
    own = Plan(8, None, without_text(plan.quantiser), plan.kernels, forms[0], keep, INTEGERS)
    if target is None:
        return own

    def packings(form: Form, kernels: Kernels) -> list[Packing]:
        found = replace(own, form=form, kernels=kernels).packed(8, ASKED_WIDTH)
        return [] if found is None else [found]

    taken, _ = settled(target, forms, packings, packings, options.computing.dtype, option=option)
    return replace(own, form=taken)


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
