"""Probe which form of quantised weights a target supports, before the model is traced.

A probe contains the nodes that the form would write, with zero weights. A provider that dequantises the whole matrix in
every run, as the CPU provider does at some levels, counts as one without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from partita.errors import ProviderError
from partita.export.passes.base import added
from partita.export.quantise.forms import ExpertsCall, Form, Place, Weight
from partita.export.quantise.write.weight_source import Layout, Packing, Sizes
from partita.export.target import Kernels, ProbeResult, Target
from partita.export.weights import to_ir

PROBED_WIDTH = 256
"""K and N of probed nodes: a multiple of every block size."""
USUAL = frozenset({32, 64})
"""Smaller blocks that are assumed to be supported without a probe."""
RESTORES = "dequantises the whole matrix in every run on this machine, which is slower than fp32"
EXPERTS = 4
GATED: Mapping[str, object] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "k": 2,
    "normalize_routing_weights": 1,
}
"""Attributes of probed experts."""
OPSET, IR_VERSION = 21, 10
Packings = Callable[[Form, Kernels], Sequence[Packing]]
"""The packings of products that a package may need in a form."""


SIZES: Mapping[str, tuple[int, ...]] = {
    "x": (1, 1, PROBED_WIDTH),
    "ids": (1, 1),
    "hidden": (1, PROBED_WIDTH),
    "scores": (1, EXPERTS),
}
"""Input shapes of the probes."""


def first_supported(
    target: Target,
    forms: Sequence[Form],
    packings: Packings,
    looked_up: Packings,
    dtype: str,
    *,
    option: tuple[str, str] | None = None,
) -> tuple[Form, Kernels]:
    """The first of `forms` that `target` supports with activations of `dtype`, and its kernels.

    Each is probed with and without zero points, the recorded variant first. Without a probe the record decides.
    `option`: the option that requested the forms, where it is not the precision and can be omitted. Raises
    ProviderError, which names the operators, when there is no kernel for any, or none that computes with quantised
    weights.
    """
    if target.ask is None:
        standard = forms[0].look_up.symmetric  # a Gather of integers, which every provider has
        return forms[0], replace(target.kernels, gather=target.kernels.gather or standard)
    answers = []
    for form in forms:
        other = replace(target.kernels, symmetric=not target.kernels.symmetric)
        for kernels in (target.kernels,) if form.one_scale else (target.kernels, other):
            answer = refusal_reason(target, form, kernels, packings(form, kernels), dtype)
            if not answer:
                takes = _supports_lookups(target, form, kernels, looked_up(form, kernels), dtype)
                return form, replace(kernels, gather=takes)
        answers.append((form, answer))
    requested = packings(forms[0], target.kernels)
    kinds = " and ".join(dict.fromkeys(f"{p.name} weights in blocks of {p.block_size}" for p in requested))
    kinds = kinds if not forms[0].one_scale else f"{requested[0].name} weights"
    tried = "" if forms[0].one_scale else ", with or without zero points"
    reasons = "; ".join(f"for {form.product.operator}{tried}: {answer}" for form, answer in answers)
    setting, otherwise = f"`precision={requested[0].name}`", "a `precision` that it computes in, e.g. fp16"
    if option is not None:
        setting = f"`{option[0]}={option[1]}`"
        otherwise = f"omit {setting}"
    raise ProviderError(
        f"{setting}: {target.provider} has no kernel that computes {dtype} activations with {kinds}: "
        f"{reasons}; nothing was written; choose another `target`, e.g. cpu, or {otherwise}"
    )


def smaller_blocks(
    target: Target,
    form: Form,
    kernels: Kernels,
    sizes: Sequence[int],
    packings: Callable[[int], Sequence[Packing]],
    looked_up: Callable[[int], Sequence[Packing]],
    dtype: str,
) -> tuple[int, ...]:
    """The block sizes of `sizes` that `target` supports, by their packings of products and of embeddings."""
    if target.ask is None:
        return tuple(size for size in sizes if size in USUAL)

    def takes(asked: Sequence[int]) -> bool:
        products = [each for size in asked for each in packings(size)]
        if refusal_reason(target, form, kernels, products, dtype):
            return False
        rows = [each for size in asked for each in looked_up(size)] if kernels.gather else []
        return not rows or _supports_lookups(target, form, kernels, rows, dtype)

    return tuple(sizes) if takes(sizes) else tuple(size for size in sizes if takes([size]))


def refusal_reason(target: Target, form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> str:
    """The reason why `target` does not compute products with quantised weights; empty when it does."""
    assert target.ask is not None
    question = product_model(form, kernels, packings, dtype)
    answer = target.ask(question, SIZES)
    if answer.failure or answer.unsupported:
        return _reason(answer)
    restores = target.unpacks is not None and target.unpacks(question, SIZES)
    return RESTORES if restores else ""


def _reason(answer: ProbeResult) -> str:
    """The reason of a rejected probe."""
    return answer.failure or f"leaves {', '.join(sorted(answer.unsupported))} to another provider"


def _supports_lookups(target: Target, form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bool:
    """Whether `target` supports row lookups of quantised weights. Without a probe its record decides."""
    assert target.ask is not None
    if not packings:
        return kernels.gather
    answer = target.ask(_lookup_model(form, kernels, packings, dtype), SIZES)
    return not answer.failure and not answer.unsupported


def refused_experts(target: Target, form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> str:
    """Why `target` does not compute experts with quantised weights, by its record if unprobed; else empty."""
    if form.experts is None or target.ask is None:
        return "" if form.experts is not None else "cannot quantise them"
    answer = target.ask(_experts_model(form, kernels, packings, dtype), SIZES)
    return _reason(answer) if answer.failure or answer.unsupported else ""


def _experts_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with one layer's gated experts for every packing."""
    assert form.experts is not None
    kind, width = to_ir(dtype), PROBED_WIDTH
    place, hidden = _new_graph("hidden", kind, kernels, SIZES["hidden"])
    scores = ir.Value(name="scores", shape=ir.Shape(SIZES["scores"]), type=ir.TensorType(kind))
    place.graph.inputs.append(scores)
    made = []
    for index, packing in enumerate(packings):
        sizes = (2 * EXPERTS * width, EXPERTS * width)
        up, down = (
            _zeros(place, f"w{index}.{rows}", form.experts.layout, Sizes(packing, kind, rows, width)) for rows in sizes
        )
        call = ExpertsCall(hidden, scores, EXPERTS, up, None, down, None, GATED)
        made.append(form.experts.write(place, call))
    return _serialised(place, made)


def product_model(
    form: Form,
    kernels: Kernels,
    packings: Sequence[Packing],
    dtype: str,
    *,
    tokens: int = 1,
    width: int = PROBED_WIDTH,
    rows: int | None = None,
) -> bytes:
    """A model with products of x [1, tokens, width] and weights [rows or width, width] of every packing."""
    place, hidden = _new_graph("x", to_ir(dtype), kernels, (1, tokens, width))
    sizes = [Sizes(packing, to_ir(dtype), rows or width, width) for packing in packings]
    weights = [_zeros(place, f"w{index}", form.product.layout, each) for index, each in enumerate(sizes)]
    return _serialised(place, [form.product.write(place, hidden, None, weight) for weight in weights])


def _lookup_model(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with a row lookup for every packing."""
    place, ids = _new_graph("ids", ir.DataType.INT64, kernels, SIZES["ids"])
    sizes = [Sizes(packing, to_ir(dtype), PROBED_WIDTH, PROBED_WIDTH) for packing in packings]
    weights = [_zeros(place, f"w{index}", form.look_up.layout, each) for index, each in enumerate(sizes)]
    return _serialised(place, [form.look_up.write(place, ids, weight) for weight in weights])


def _new_graph(name: str, dtype: ir.DataType, kernels: Kernels, shape: tuple[int, ...]) -> tuple[Place, ir.Value]:
    """A graph with one input, and a place at its end."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": OPSET, "com.microsoft": 1}, name="packed")
    return Place(graph, None, kernels), value


def _zeros(place: Place, name: str, layout: Layout, sizes: Sizes) -> Weight:
    """A weight of zeros; its scales are 1."""
    values = []
    for part in layout.parts(sizes):
        array = np.ones(part.shape) if part.dtype.is_floating_point() else np.zeros(part.shape)
        tensor = ir.tensor(array.astype(part.dtype.numpy()), dtype=part.dtype)
        values.append(added(place.graph, tensor, f"{name}.{part.label}" if part.label else name))
    return Weight(tuple(values), sizes.rows, sizes.width, sizes.packing)


def _serialised(place: Place, outputs: Sequence[ir.Value]) -> bytes:
    """The serialised model, with names for all nodes and values."""
    for index, node in enumerate(place.graph):
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            value.name = f"{node.name}.output"
    place.graph.outputs.extend(outputs)
    return bytes(ir.to_proto(ir.Model(place.graph, ir_version=IR_VERSION)).SerializeToString())
