"""Bytes that the CPU kernels of one of our graphs read from weights per token, counted in what they pack.

ONNX Runtime packs a weight of small integers on x86 with a float32 scale and a float32 sum per block, whatever the file
has; a weight of 16 bits is widened when it is loaded. An embedding is read for one row and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

PACKED_BLOCK_BYTES = 8
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
INTEGERS = ("MatMulInteger", "MatMulIntegerToFloat")
EXPERTS = ("MoE", "QMoE")
SEEN_THROUGH = ("Cast", "DequantizeLinear", "Transpose", "Reshape", "Identity")
"""What ONNX Runtime computes, or joins with the product, when it opens a graph."""


@dataclass(frozen=True, slots=True)
class Weight:
    """An initializer that a product reads."""

    shape: tuple[int, ...]
    dtype: int
    """TensorProto.DataType."""
    block_size: int = 0
    """Of the DequantizeLinear between the two; 0: there is none."""


def decode_bytes(model: Path) -> int:
    """Of all products of the graph in `model`."""
    import onnx

    graph = onnx.load(str(model), load_external_data=False).graph
    stored = {entry.name: Weight(tuple(entry.dims), entry.data_type) for entry in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    return sum(_node_bytes(node, stored, makers) for node in graph.node)


def _node_bytes(node: Any, stored: Mapping[str, Weight], makers: Mapping[str, Any]) -> int:
    given = {each.name: each.i for each in node.attribute}
    if node.op_type == "MatMulNBits":
        blocks = given["N"] * ceil(given["K"] / given["block_size"])
        return int(blocks * (given["block_size"] * given["bits"] // 8 + PACKED_BLOCK_BYTES))
    weights = list(_weights(node, stored, makers))
    if node.op_type in PRODUCTS:
        return sum(_product_bytes(weight) for weight in weights)
    if node.op_type in INTEGERS:
        return sum(prod(weight.shape) for weight in weights if len(weight.shape) == 2)
    if node.op_type in EXPERTS:
        stacks = [weight for weight in weights if len(weight.shape) == 3]
        used, packed = given.get("k", 1), "expert_weight_bits" in given
        return sum(prod(weight.shape[1:]) * used * _expert_bytes(weight, packed) for weight in stacks)
    return 0


def _expert_bytes(weight: Weight, packed: bool) -> int:
    """Of an element of a stack: integers that are packed, or what is packed for each scale of theirs, or float32."""
    if not packed:
        return 4
    return 1 if bits_of(weight.dtype) == 8 else PACKED_BLOCK_BYTES


def _product_bytes(weight: Weight) -> int:
    if not weight.block_size:
        return 4 * prod(weight.shape)
    count = prod(weight.shape)
    return count * bits_of(weight.dtype) // 8 + count // weight.block_size * PACKED_BLOCK_BYTES


def bits_of(dtype: int) -> int:
    """Bits of an integer of ONNX's type; 0 for one that is none of the small ones."""
    import onnx

    types = onnx.TensorProto
    known: dict[int, int] = {types.UINT8: 8, types.INT8: 8, types.UINT4: 4, types.INT4: 4}
    return known.get(dtype, 0)


def _weights(node: Any, stored: Mapping[str, Weight], makers: Mapping[str, Any]) -> Iterator[Weight]:
    """Initializers that a node reads, by itself or through what is gone when the graph is open."""
    for name in node.input:
        block_size = 0
        while name not in stored and name in makers and makers[name].op_type in SEEN_THROUGH:
            maker = makers[name]
            block_size = next((each.i for each in maker.attribute if each.name == "block_size"), block_size)
            name = maker.input[0]
        if name in stored:
            weight = stored[name]
            yield Weight(weight.shape, weight.dtype, block_size)
