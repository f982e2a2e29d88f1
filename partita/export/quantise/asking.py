"""Which form of packed weights a target takes: it is asked about one after the other, before anything is traced.

What is asked about is what would be written: the form itself writes its nodes, over weights of 0. A provider may have a
kernel and be slower with it than with floats, as the CPU provider is where it restores the whole matrix in every run.
So where the target can be timed, a product of each packing is timed beside one in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from partita.errors import ProviderError
from partita.export.graph.element_types import to_ir
from partita.export.quantise.forms import ExpertsCall, Form, Place, Weight
from partita.export.quantise.write.experts import DOMAIN, PLAIN
from partita.export.quantise.write.kernels import Kernels
from partita.export.quantise.write.layouts import Layout
from partita.export.quantise.write.packed import Packing
from partita.export.target import Answer, Question, Target, Timed
from partita.export.weights.sources import Part

ASKED_WIDTH = 256
"""K and N of the nodes that are asked about: a multiple of every block size."""
USUAL = frozenset({32, 64})
"""Smaller blocks that are taken for granted where nobody can be asked."""
TIMED_WIDTH = 2048
"""K and N of the products that are timed, of one token: a weight in float32 that no small cache holds."""
TIMED_EXPERTS = 512
"""The same of experts."""
SLOWER = 1.5
"""What takes more than so many times as long as float32 is refused: a kernel that is missing costs far more than that,
and other work on the machine less.
"""
RESTORES = "restores the whole matrix in every run on this machine, which is slower than fp32"
EXPERTS = 4
GATED: Mapping[str, object] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "k": 2,
    "normalize_routing_weights": 1,
}
"""Attributes of experts that are asked about."""
OPSET, IR_VERSION = 21, 10
Packings = Callable[[Form, Kernels], Sequence[Packing]]
"""The packings of products that a package may need in some form."""


def _sizes(width: int) -> Mapping[str, tuple[int, ...]]:
    """Of the inputs of a model of one token."""
    return {"x": (1, 1, width), "ids": (1, 1), "hidden": (1, width), "scores": (1, EXPERTS)}


SIZES = _sizes(ASKED_WIDTH)
"""Of the inputs of what is asked."""


def _nothing(form: Form, kernels: Kernels) -> Sequence[Packing]:
    """No packing."""
    return ()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Sizes of a weight that is asked about."""

    packing: Packing
    dtype: ir.DataType
    rows: int = ASKED_WIDTH
    width: int = ASKED_WIDTH

    @property
    def blocks_per_row(self) -> int:
        """M."""
        return -(-self.width // self.packing.block_size)


def settled(
    target: Target,
    forms: Sequence[Form],
    packings: Packings,
    looked_up: Packings,
    dtype: str,
    multiplied: Packings = _nothing,
    *,
    option: tuple[str, str] | None = None,
) -> tuple[Form, Kernels]:
    """The first of `forms` that `target` takes, computing in `dtype`, and how.

    Each is asked about with and without zero points, that of the target's record first. Where nobody can be asked, the
    record decides. Raises ProviderError, which names the operators, when there is no kernel for any, or none that
    computes with packed weights, or is as fast as float32 with those that are `multiplied` in steps of one token.
    `option`: what was asked for by it, and can be left out, where it is not the precision.
    """
    if target.ask is None:
        standard = forms[0].look_up.symmetric  # a Gather of integers, which every provider has
        return forms[0], replace(target.kernels, gather=target.kernels.gather or standard)
    said = []
    for form in forms:
        for kernels in _both(target.kernels, form):
            answer = refused(target, form, kernels, packings(form, kernels), dtype, multiplied(form, kernels))
            if not answer:
                takes = _looks_up(target, form, kernels, looked_up(form, kernels), dtype)
                return form, replace(kernels, gather=takes)
        said.append((form, answer))
    asked = packings(forms[0], target.kernels)
    kinds = " and ".join(dict.fromkeys(f"{p.name} weights in blocks of {p.block_size}" for p in asked))
    kinds = kinds if not forms[0].one_scale else f"{asked[0].name} weights"
    tried = "" if forms[0].one_scale else ", with or without zero points"
    told = "; ".join(f"for {form.product.operator}{tried}: {answer}" for form, answer in said)
    wanted, otherwise = f"`precision={asked[0].name}`", "a `precision` that it computes in, as fp16"
    if option is not None:
        wanted = f"`{option[0]}={option[1]}`"
        otherwise = f"leave {wanted} out"
    raise ProviderError(
        f"{wanted}: {target.provider} has no kernel that computes {dtype} activations with {kinds}: {told}; nothing "
        f"was written; name another `target`, as cpu, or {otherwise}"
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
    """Those of `sizes` that `target` takes blocks of, too: for weights whose rows the size that is wanted does not
    divide. All are asked about at once, and alone where that is refused. `packings`, `looked_up`: those of products and
    of embeddings in blocks of a size.
    """
    if target.ask is None:
        return tuple(size for size in sizes if size in USUAL)

    def takes(asked: Sequence[int]) -> bool:
        products = [each for size in asked for each in packings(size)]
        if refused(target, form, kernels, products, dtype, products):
            return False
        rows = [each for size in asked for each in looked_up(size)] if kernels.gather else []
        return not rows or _looks_up(target, form, kernels, rows, dtype)

    return tuple(sizes) if takes(sizes) else tuple(size for size in sizes if takes([size]))


def _both(kernels: Kernels, form: Form) -> Sequence[Kernels]:
    """The target's record, and the other way with zero points, where the form can have them."""
    return (kernels,) if form.one_scale else (kernels, replace(kernels, symmetric=not kernels.symmetric))


def refused(
    target: Target,
    form: Form,
    kernels: Kernels,
    packings: Sequence[Packing],
    dtype: str,
    multiplied: Sequence[Packing] = (),
) -> str:
    """Why `target` does not compute products of a form with packed weights; empty when it does.

    `multiplied`: those that are to be as fast as float32 in a step of one token, as far as that can be found out.
    """
    assert target.ask is not None
    question = asked_products(form, kernels, packings, dtype)
    answer = target.ask(question, SIZES)
    if answer.fails or answer.left:
        return _told(answer)
    if multiplied and target.compares is not None:
        return _slower(target, form, kernels, multiplied, dtype)
    return RESTORES if _restores(target, question) else ""


def _restores(target: Target, question: bytes) -> bool:
    """Whether the target is known to restore packed weights in every run."""
    return target.unpacks is not None and target.unpacks(question, SIZES)


def _slower(target: Target, form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> str:
    """How much slower than a product in float32 the slowest is, and why; empty when none is."""
    plain: Timed = f"MatMul of {TIMED_WIDTH}", partial(_plain_product, TIMED_WIDTH)
    products: list[Timed] = []
    for packing in packings:
        question = asked_products(form, kernels, [packing], dtype)
        large = replace(packing, block_size=TIMED_WIDTH) if form.one_scale else packing
        products.append((_key(question, TIMED_WIDTH), partial(_timed_product, form, kernels, large, dtype)))
    found = _slowest(target, packings, products, plain, in_blocks=not form.one_scale)
    if found is None:
        return ""
    packing, told = found
    why = _restores(target, asked_products(form, kernels, [packing], dtype))
    return f"{told}{': the whole matrix is restored in every run' if why else ''}"


def _slowest(
    target: Target, packings: Sequence[Packing], timed: Sequence[Timed], plain: Timed, *, in_blocks: bool = True
) -> tuple[Packing, str] | None:
    """The packing with which the target is the slowest beside float32, and by how much; None when it is with none."""
    assert target.compares is not None
    times = target.compares(timed, plain)
    packing, (packed, floats) = max(zip(packings, times, strict=True), key=lambda entry: entry[1][0] / entry[1][1])
    if packed <= SLOWER * floats:
        return None
    weights = f"{packing.name} weights{f' in blocks of {packing.block_size}' if in_blocks else ''}"
    return packing, (
        f"takes {packed / floats:.1f} times as long as fp32 for a token with {weights} on this machine "
        f"({1e3 * packed:.3g} and {1e3 * floats:.3g} ms)"
    )


def _key(question: bytes, width: int) -> str:
    """What tells a product of a width from every other; `question`: the same one, as it is asked about."""
    return f"{hashlib.sha256(question).hexdigest()[:32]} of {width}"


def _timed_product(form: Form, kernels: Kernels, packing: Packing, dtype: str) -> Question:
    """A product as it is timed."""
    return asked_products(form, kernels, [packing], dtype, width=TIMED_WIDTH), {"x": (1, 1, TIMED_WIDTH)}


def _plain_product(width: int) -> Question:
    """The same in float32."""
    place, hidden = _begun("x", ir.DataType.FLOAT, Kernels(), (1, 1, width))
    weight = _floats(place, "w", (width, width))
    made = place.node("MatMul", [hidden, weight], dtype=ir.DataType.FLOAT, shape=(1, 1, width))
    return _finished(place, [made]), {"x": (1, 1, width)}


def _floats(place: Place, name: str, shape: tuple[int, ...]) -> ir.Value:
    """A weight in float32 that is 0 everywhere."""
    return place.constant(np.zeros(shape, np.float32), name)


def _told(answer: Answer) -> str:
    """What a provider said of nodes that it does not take."""
    return answer.fails or f"leaves {', '.join(sorted(answer.left))} to another provider"


def _looks_up(target: Target, form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bool:
    """Whether `target` looks up rows of packed weights; its record decides where there is nothing to ask about."""
    assert target.ask is not None
    if not packings:
        return kernels.gather
    answer = target.ask(_asked_look_ups(form, kernels, packings, dtype), SIZES)
    return not answer.fails and not answer.left


def refused_experts(
    target: Target,
    form: Form,
    kernels: Kernels,
    packings: Sequence[Packing],
    dtype: str,
    multiplied: Sequence[Packing] = (),
) -> str:
    """Why `target` does not compute experts with packed weights, as `refused` says it of products; its record decides
    where it cannot be asked.
    """
    if form.experts is None or target.ask is None:
        return "" if form.experts is not None else "has no packed form of them"
    answer = target.ask(_asked_experts(form, kernels, packings, dtype), SIZES)
    if answer.fails or answer.left:
        return _told(answer)
    if not multiplied or target.compares is None:
        return ""
    plain: Timed = f"{PLAIN} of {TIMED_EXPERTS}", partial(_plain_experts, TIMED_EXPERTS)
    timed: list[Timed] = []
    for packing in multiplied:
        question = _asked_experts(form, kernels, [packing], dtype)
        timed.append((_key(question, TIMED_EXPERTS), partial(_timed_experts, form, kernels, packing, dtype)))
    found = _slowest(target, multiplied, timed, plain)
    return "" if found is None else found[1]


def _asked_experts(
    form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str, width: int = ASKED_WIDTH
) -> bytes:
    """A model with the experts of a layer for every packing, gated as most are."""
    assert form.experts is not None
    place, hidden, scores = _before_experts(to_ir(dtype), kernels, width)
    made = []
    for index, packing in enumerate(packings):
        sizes = (2 * EXPERTS * width, EXPERTS * width)
        up, down = (
            _zeros(place, f"w{index}.{rows}", form.experts.layout, _Asked(packing, to_ir(dtype), rows, width))
            for rows in sizes
        )
        call = ExpertsCall(hidden, scores, EXPERTS, up, None, down, None, GATED)
        made.append(form.experts.write(place, call))
    return _finished(place, made)


def _before_experts(dtype: ir.DataType, kernels: Kernels, width: int) -> tuple[Place, ir.Value, ir.Value]:
    """A graph to be written at its end, and what experts are given."""
    place, hidden = _begun("hidden", dtype, kernels, (1, width))
    scores = ir.Value(name="scores", shape=ir.Shape((1, EXPERTS)), type=ir.TensorType(dtype))
    place.graph.inputs.append(scores)
    return place, hidden, scores


def _timed_experts(form: Form, kernels: Kernels, packing: Packing, dtype: str) -> Question:
    """Experts as they are timed."""
    sizes = _sizes(TIMED_EXPERTS)
    return _asked_experts(form, kernels, [packing], dtype, TIMED_EXPERTS), sizes


def _plain_experts(width: int) -> Question:
    """The same in float32."""
    place, hidden, scores = _before_experts(ir.DataType.FLOAT, Kernels(), width)
    up, down = (_floats(place, name, (EXPERTS, size, width)) for name, size in (("up", 2 * width), ("down", width)))
    made = place.node(
        PLAIN,
        [hidden, scores, up, None, down],
        dtype=ir.DataType.FLOAT,
        shape=(1, width),
        domain=DOMAIN,
        attributes=GATED,
    )
    return _finished(place, [made]), _sizes(width)


def asked_products(
    form: Form,
    kernels: Kernels,
    packings: Sequence[Packing],
    dtype: str,
    *,
    tokens: int = 1,
    width: int = ASKED_WIDTH,
    rows: int | None = None,
) -> bytes:
    """A model with a product of x [1, tokens, width] and a weight [rows, width] for every packing; as many rows as the
    width where nothing is said.
    """
    place, hidden = _begun("x", to_ir(dtype), kernels, (1, tokens, width))
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.product.layout, _Asked(packing, to_ir(dtype), rows or width, width))
        made.append(form.product.write(place, hidden, None, weight))
    return _finished(place, made)


def _asked_look_ups(form: Form, kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with a look-up for every packing."""
    place, ids = _begun("ids", ir.DataType.INT64, kernels, SIZES["ids"])
    made = []
    for index, packing in enumerate(packings):
        weight = _zeros(place, f"w{index}", form.look_up.layout, _Asked(packing, to_ir(dtype)))
        made.append(form.look_up.write(place, ids, weight))
    return _finished(place, made)


def _begun(name: str, dtype: ir.DataType, kernels: Kernels, shape: tuple[int, ...]) -> tuple[Place, ir.Value]:
    """A graph with one input, to be written at its end."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": OPSET, "com.microsoft": 1}, name="packed")
    return Place(graph, None, kernels), value


def _zeros(place: Place, name: str, layout: Layout, sizes: _Asked) -> Weight:
    """A weight that is 0 everywhere."""
    values = tuple(_zero_part(place, name, part) for part in layout.parts(sizes))
    return Weight(values, sizes.rows, sizes.width, sizes.packing)


def _zero_part(place: Place, name: str, part: Part) -> ir.Value:
    """A part of it. Scales are 1."""
    name = f"{name}.{part.label}" if part.label else name
    array = np.ones(part.shape) if part.dtype.is_floating_point() else np.zeros(part.shape)
    tensor = ir.tensor(array.astype(part.dtype.numpy()), dtype=part.dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(part.shape), type=ir.TensorType(part.dtype), const_value=tensor)
    place.graph.initializers[name] = value
    return value


def _finished(place: Place, outputs: Sequence[ir.Value]) -> bytes:
    """The model, with a name for everything."""
    for index, node in enumerate(place.graph):
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            value.name = f"{node.name}.output"
    place.graph.outputs.extend(outputs)
    return bytes(ir.to_proto(ir.Model(place.graph, ir_version=IR_VERSION)).SerializeToString())
