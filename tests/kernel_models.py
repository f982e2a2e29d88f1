"""ONNX files of one node each, by the kernel that a provider takes for it. Random weights, static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

CONTRIB = "com.microsoft"
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
Array = npt.NDArray[Any]
Inputs = dict[str, tuple[int, tuple[int, ...]]]
"""Element type and shape by name."""


def save(
    path: Path, nodes: Sequence[onnx.NodeProto], inputs: Inputs, constants: dict[str, Array], opset: int = 21
) -> Path:
    """Write a model; the outputs are those of the last node."""
    tensors = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    kind = next(iter(inputs.values()))[0]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in nodes[-1].output]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    graph = helper.make_graph(list(nodes), "kernels", ports, outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def packed(path, *, bits=4, block=32, level=4, zeros="", order=False, constant=True, rows=1, size=256) -> Path:
    """MatMulNBits. `zeros`: integer or float zero points; `order`: with g_idx; `constant`: the weight is one."""
    rng, blocks = np.random.default_rng(0), size // block
    constants: dict[str, Array] = {
        "w": rng.integers(0, 255, (size, blocks, block * bits // 8), dtype=np.uint8),
        "scales": rng.random(size * blocks, dtype=np.float32) / 100,
    }
    if zeros == "integer":
        constants["zeros"] = rng.integers(0, 255, size * -(-blocks * bits // 8), dtype=np.uint8)
    elif zeros:
        constants["zeros"] = np.full((size, blocks), 2 ** (bits - 1), np.float32)
    if order:
        constants["order"] = (np.arange(size) // block).astype(np.int32)
    inputs: Inputs = {"x": (FLOAT, (rows, size))}
    if not constant:
        inputs["w"] = (TensorProto.UINT8, constants.pop("w").shape)
    names = ["x", "w", "scales", "zeros" if zeros else "", "order" if order else ""]
    given = {} if level is None else {"accuracy_level": level}
    made: dict[str, Any] = {"K": size, "N": size, "bits": bits, "block_size": block, **given}
    node = helper.make_node("MatMulNBits", names, ["y"], name="node", domain=CONTRIB, **made)
    return save(path, [node], inputs, constants)


def bitsandbytes(path: Path, *, size: int = 256) -> Path:
    """MatMulBnb4."""
    rng = np.random.default_rng(0)
    constants: dict[str, Array] = {
        "w": rng.integers(0, 255, size * size // 2, dtype=np.uint8),
        "scales": np.ones(size * size // 64, np.float32),
    }
    made: dict[str, Any] = {"K": size, "N": size, "block_size": 64, "quant_type": 1}
    node = helper.make_node("MatMulBnb4", ["x", "w", "scales"], ["y"], name="node", domain=CONTRIB, **made)
    return save(path, [node], {"x": (FLOAT, (1, size))}, constants)


def experts(path: Path, *, level: int | None = 4, size: int = 256) -> Path:
    """QMoE with two experts of 4 bits."""
    rng, block = np.random.default_rng(0), 32
    constants: dict[str, Array] = {}
    for name, rows in (("up", 2 * size), ("down", size)):
        constants[name] = rng.integers(0, 255, (2, rows, size // 2), dtype=np.uint8)
        constants[f"{name}.scales"] = np.full((2, rows, size // block), 0.01, np.float32)
    names = ["x", "router", "up", "up.scales", "", "down", "down.scales"]
    made: dict[str, Any] = {"k": 1, "expert_weight_bits": 4, "block_size": block, "swiglu_fusion": 1}
    made |= {"activation_type": "swiglu"} | ({} if level is None else {"accuracy_level": level})
    node = helper.make_node("QMoE", names, ["y"], name="node", domain=CONTRIB, **made)
    return save(path, [node], {"x": (FLOAT, (1, size)), "router": (FLOAT, (1, 2))}, constants)


def dequantised(path: Path, *, transposed: bool, size: int = 256) -> Path:
    """DequantizeLinear and MatMul, which ONNX Runtime fuses unless the weight is `transposed`."""
    rng, block, axis = np.random.default_rng(0), 32, int(transposed)
    shape = [size, size]
    shape[axis] //= block
    constants: dict[str, Array] = {
        "w": rng.integers(-99, 99, (size, size), dtype=np.int8),
        "scales": np.full(shape, 0.01, np.float32),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scales"], ["d"], name="node", axis=axis, block_size=block),
        *([helper.make_node("Transpose", ["d"], ["t"], name="t", perm=[1, 0])] if transposed else []),
        helper.make_node("MatMul", ["x", "t" if transposed else "d"], ["y"], name="product"),
    ]
    return save(path, nodes, {"x": (FLOAT, (1, size))}, constants)


def grouped(
    path, *, tokens=16, past=0, length=64, heads=4, head_size=64, kind=FLOAT, cache=None, extra="", **given: Any
) -> Path:
    """GroupQueryAttention with lengths as constants. `extra`: bias or sink; `cache`: element type."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    kept = kind if cache is None else cache
    inputs: Inputs = {
        "q": (kind, (1, tokens, heads * head_size)),
        "k": (kind, (1, tokens, 2 * head_size)),
        "v": (kind, (1, tokens, 2 * head_size)),
        "past_k": (kept, (1, 2, length, head_size)),
        "past_v": (kept, (1, 2, length, head_size)),
    }
    constants: dict[str, Array] = {
        "seqlens": np.array([past + tokens - 1], np.int32),
        "total": np.array([past + tokens], np.int32),
    }
    names = [*inputs, "seqlens", "total", *[""] * 7]
    if extra == "bias":
        inputs["bias"], names[10] = (kind, (1, 1, tokens, past + tokens)), "bias"
    elif extra == "sink":
        constants["sink"], names[11] = np.zeros(heads, dtype), "sink"
    if cache is not None:
        constants |= {"k_scale": np.array([0.05], np.float32), "v_scale": np.array([0.05], np.float32)}
        names[12:14] = ["k_scale", "v_scale"]
        given |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    made = {"num_heads": heads, "kv_num_heads": 2, **given}
    node = helper.make_node("GroupQueryAttention", names, ["y", "k2", "v2"], name="node", domain=CONTRIB, **made)
    return _typed(save(path, [node], inputs, constants), [kind, kept, kept])


def multi_head(path, *, tokens=16, head_size=64, kind=FLOAT, extra="", **given: Any) -> Path:
    """MultiHeadAttention. `extra`: mask (of keys), bias or past."""
    inputs: Inputs = {}
    inputs |= dict.fromkeys("qkv", (kind, (1, tokens, 4 * head_size)))
    constants: dict[str, Array] = {}
    names = [*inputs, "", "", "", "", ""]
    outputs = ["y"]
    if extra == "mask":
        constants["mask"], names[4] = np.ones((1, tokens), np.int32), "mask"
    elif extra == "bias":
        inputs["bias"], names[5] = (kind, (1, 1, tokens, tokens)), "bias"
    elif extra == "past":
        inputs |= dict.fromkeys(("past_k", "past_v"), (kind, (1, 4, 8, head_size)))
        names[6:8], outputs = ["past_k", "past_v"], ["y", "k2", "v2"]
    node = helper.make_node("MultiHeadAttention", names, outputs, name="node", domain=CONTRIB, num_heads=4, **given)
    return save(path, [node], inputs, constants)


def standard(path: Path, *, tokens: int = 1, length: int = 64, valid: int | None = 16) -> Path:
    """Attention of opset 24. `valid`: tokens in a cache of `length`; None: no cache."""
    inputs: Inputs = {
        "q": (FLOAT, (1, 4, tokens, 64)),
        "k": (FLOAT, (1, 2, length, 64)),
        "v": (FLOAT, (1, 2, length, 64)),
    }
    constants = {} if valid is None else {"valid": np.array([valid], np.int64)}
    node = helper.make_node("Attention", [*inputs, "", "", "", *constants], ["y"], name="node")
    return save(path, [node], inputs, constants, opset=24)


def chain(path: Path, *, kind: int, size: int = 256) -> Path:
    """MatMul and Softmax of one element type."""
    weight = np.random.default_rng(0).standard_normal((size, size)).astype(helper.tensor_dtype_to_np_dtype(kind))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="node"),
        helper.make_node("Softmax", ["h"], ["y"], name="softmax"),
    ]
    return save(path, nodes, {"x": (kind, (1, size))}, {"w": weight})


def convolution(path: Path) -> Path:
    """Conv of 16 channels, for which providers prefer another layout."""
    weight = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="node", pads=[1, 1, 1, 1])
    return save(path, [node], {"x": (FLOAT, (1, 16, 8, 8))}, {"w": weight}, opset=17)


def integers(path: Path) -> Path:
    """MatMulInteger whose products saturate in pairs without an instruction for dot products."""
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"], name="node")
    made = save(path, [node], {"x": (TensorProto.UINT8, (1, 64))}, {"w": np.full((64, 16), 127, np.int8)})
    return _typed(made, [TensorProto.INT32])


def together(path: Path, makers: dict[str, Callable[[Path], Path]]) -> Path:
    """Write one model with the nodes of several, with names `NAME/node`."""
    parts = [compose.add_prefix(onnx.load(make(path)), f"{name}/") for name, make in makers.items()]
    whole = parts[0]
    for part in parts[1:]:
        for field in ("node", "input", "output", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
    onnx.save(whole, path)
    return path


def _typed(path: Path, kinds: Sequence[int]) -> Path:
    """Give the outputs their element types."""
    model = onnx.load(path)
    for port, kind in zip(model.graph.output, kinds, strict=True):
        port.type.tensor_type.elem_type = kind
    onnx.save(model, path)
    return path
