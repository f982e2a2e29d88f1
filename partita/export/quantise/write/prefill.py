"""A separate prefill graph with 8-bit integer products, next to a decode graph with quantised weights.

Prefill is compute-bound and a decode step memory-bound: an integer matrix unit is faster for many tokens, and fewer
bytes are faster for one. Both graphs share one cache. The head and embeddings are those of the decode graph, so their
bytes are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from partita.errors import UsageError
from partita.export.options import INTEGERS, ExportOptions
from partita.export.passes.base import PassContext
from partita.export.quantise.form_probes import PROBED_WIDTH, first_supported
from partita.export.quantise.forms import Form, candidates
from partita.export.quantise.plan import Plan
from partita.export.quantise.quantisers import without_text
from partita.export.quantise.write.rewrite import Outcome, quantise
from partita.export.quantise.write.weight_source import Packing
from partita.export.target import Kernels, Target
from partita.export.weights.sources import FloatSource


def prefill_plan(options: ExportOptions, target: Target | None, plan: Plan | None) -> Plan | None:
    """The quantisation plan of the prefill graph; None when no prefill graph was requested.

    Raises UsageError for activations other than float32, and ProviderError when the target has no kernel.
    """
    asked = options.prefill_precision
    if asked is None or plan is None:
        return None
    option = ("prefill_precision", asked)
    if options.computing.dtype != "float32":
        raise UsageError(
            f"`prefill_precision={asked}`: the package computes in {options.computing.dtype} between its "
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


def pack(
    model: ir.Model,
    context: PassContext,
    prompt_plan: Plan,
    plan: Plan,
    own: Outcome,
    shared: Outcome,
    movable: Callable[[FloatSource], bool],
) -> dict[str, int]:
    """Quantise the weights of the prefill graph, in place.

    `prompt_plan` packs weights into `own`; others follow `plan`, that of the decode graph, into `shared`. Returns the
    number of replaced nodes by pass name. Raises PassError.
    """
    first = quantise(model, context, prompt_plan, own, movable, rest=plan)
    second = quantise(model, context, plan, shared, movable)
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
