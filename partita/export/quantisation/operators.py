"""Operators on packed weights, and which form of them the provider takes that a package is for.

    y = MatMulNBits(x [..., K], W [N, M, bytes], scales [N, M], zero points [N, packed M])
    e = GatherBlockQuantized(E [V, bytes], ids, scales [V, M], zero points [V, packed M])

Asked is about one node of each kind, before anything is traced: a precision that the provider has no kernel for is
refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partita import dtypes
from partita.errors import ProviderError
from partita.export.quantisation.kernels import Kernels
from partita.export.quantisation.packed import Packing
from partita.export.target import Target
from partita.spelling import spelled

DOMAIN = "com.microsoft"
MATMUL, GATHER = "MatMulNBits", "GatherBlockQuantized"
ASKED_WIDTH = 256
"""K and N of the nodes that are asked about: a multiple of every block size."""
SIZES: Mapping[str, tuple[int, ...]] = {"x": (1, 1, ASKED_WIDTH), "ids": (1, 1)}
"""Of the inputs of what is asked."""


def settled(target: Target, packings: Sequence[Packing], dtype: str) -> Kernels:
    """What `target` takes of `packings`, computing in `dtype`.

    Each form is asked about with and without zero points, that of its record first. Where nobody can be asked, the
    record decides. Raises ProviderError, which names the operator, when there is no kernel for either form, or none
    that computes with packed weights.
    """
    kernels = target.kernels
    if target.ask is None:
        return kernels
    said = ""
    for tried in (kernels, replace(kernels, symmetric=not kernels.symmetric)):
        question = _question(tried, packings, dtype)
        answer = target.ask(question, SIZES)
        if answer.left.get(MATMUL) or answer.fails:
            said = answer.fails or "leaves it to another provider"
        elif target.unpacks is not None and target.unpacks(question, SIZES):
            said = "restores the whole matrix in every run on this machine, which is slower than fp32"
        else:
            return replace(tried, gather=not answer.left.get(GATHER))
    names = " and ".join(dict.fromkeys(f"{p.name} weights in blocks of {p.block_size}" for p in packings))
    raise ProviderError(
        f"{spelled('precision', packings[0].name)}: {target.provider} has no kernel for {MATMUL} ({DOMAIN}) with "
        f"{names} and {dtype} activations, with or without zero points: {said}; nothing was written; name another "
        f"{spelled('target')}, as cpu, or a {spelled('precision')} that it computes in, as fp16"
    )


def _question(kernels: Kernels, packings: Sequence[Packing], dtype: str) -> bytes:
    """A model with one node of each kind for every packing."""
    number = dtypes.named(dtype).number
    nodes, constants, outputs = [], [], []
    for index, packing in enumerate(packings):
        parts = dict(_constants(f"w{index}", packing, kernels, dtype))
        constants += list(parts.values())
        names = list(parts)
        name = f"{MATMUL}_{index}"
        attributes = matmul_attributes(ASKED_WIDTH, ASKED_WIDTH, packing, kernels)
        nodes.append(helper.make_node(MATMUL, ["x", *names], [name], name=name, domain=DOMAIN, **attributes))
        outputs.append(helper.make_tensor_value_info(name, number, [1, 1, ASKED_WIDTH]))
        flat = numpy_helper.to_array(parts[names[0]]).reshape(ASKED_WIDTH, -1)
        constants.append(numpy_helper.from_array(flat, f"w{index}.rows"))
        name = f"{GATHER}_{index}"
        reads = [f"w{index}.rows", "ids", *names[1:]]
        nodes.append(helper.make_node(GATHER, reads, [name], name=name, domain=DOMAIN, **gather_attributes(packing)))
        outputs.append(helper.make_tensor_value_info(name, number, [1, 1, ASKED_WIDTH]))
    inputs = [
        helper.make_tensor_value_info("x", number, [1, 1, ASKED_WIDTH]),
        helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [1, 1]),
    ]
    graph = helper.make_graph(nodes, "packed", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def _constants(name: str, packing: Packing, kernels: Kernels, dtype: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    """The parts of a weight [K, K] that is 0 everywhere."""
    bits, size = packing.grid.bits, packing.block_size
    count = ASKED_WIDTH // size
    yield name, numpy_helper.from_array(np.zeros((ASKED_WIDTH, count, size * bits // 8), np.uint8), name)
    scales = np.ones((ASKED_WIDTH, count), np.float32)
    yield f"{name}.s", numpy_helper.from_array(scales.astype(dtype), f"{name}.s")
    if not kernels.symmetric:
        zeros = np.zeros((ASKED_WIDTH, -(-count * bits // 8)), np.uint8)
        yield f"{name}.z", numpy_helper.from_array(zeros, f"{name}.z")


def matmul_attributes(rows: int, width: int, packing: Packing, kernels: Kernels) -> dict[str, Any]:
    """Attributes of MatMulNBits for a weight [N, K]."""
    return {
        "K": width,
        "N": rows,
        "bits": packing.grid.bits,
        "block_size": packing.block_size,
        "accuracy_level": kernels.accuracy_level,
    }


def gather_attributes(packing: Packing) -> dict[str, Any]:
    """Attributes of GatherBlockQuantized."""
    return {"bits": packing.grid.bits, "block_size": packing.block_size, "gather_axis": 0, "quantize_axis": 1}
