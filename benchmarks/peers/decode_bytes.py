"""Bytes that the CPU kernels of one of our graphs read from weights per token, counted in what they pack.

ONNX Runtime packs a MatMulNBits weight on x86 with a float32 scale and a float32 sum per block, whatever the file has;
a float16 weight is widened when it is loaded. An embedding is read for one row and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any

PACKED_BLOCK_BYTES = 8
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
INTEGERS = ("MatMulInteger", "MatMulIntegerToFloat")
EXPERTS = ("MoE", "QMoE")


def decode_bytes(model: Path) -> int:
    """Of all products of the graph in `model`."""
    import onnx

    graph = onnx.load(str(model), load_external_data=False).graph
    shapes = {entry.name: tuple(entry.dims) for entry in graph.initializer}
    return sum(_node_bytes(node, shapes) for node in graph.node)


def _node_bytes(node: Any, shapes: dict[str, tuple[int, ...]]) -> int:
    if node.op_type == "MatMulNBits":
        given = {each.name: each.i for each in node.attribute}
        blocks = given["N"] * ceil(given["K"] / given["block_size"])
        return int(blocks * (given["block_size"] * given["bits"] // 8 + PACKED_BLOCK_BYTES))
    if node.op_type in PRODUCTS:
        return sum(4 * prod(shape) for shape in _constants(node, shapes))
    if node.op_type in INTEGERS:
        return sum(prod(shape) for shape in _constants(node, shapes) if len(shape) == 2)
    if node.op_type in EXPERTS:
        used = next((each.i for each in node.attribute if each.name == "k"), 1)
        bits = next((each.i for each in node.attribute if each.name == "expert_weight_bits"), 0)
        stacks = [shape for shape in _constants(node, shapes) if len(shape) == 3]
        return sum(prod(shape[1:]) * used * (1 if bits else 4) for shape in stacks)
    return 0


def _constants(node: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    return (shapes[name] for name in node.input if name in shapes)
