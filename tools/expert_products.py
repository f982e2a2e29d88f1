"""Times a layer of experts in float32 and with packed weights, on the CPU provider of this machine.

    python -m tools.expert_products [--experts 64] [--width 1024] [--inner 1024] [--chosen 8] [--tokens 1,128]

MoE over float32 beside QMoE over integers, and how far QMoE is from MoE over the weights that the integers stand for.
Sessions are of one node; the figure is the CPU time of one thread, the least of some rounds. It takes a minute, and
three times the memory of the weights in float32, which are 0.8 GB by default.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
from onnx import helper

from partita.export.quantise import Grid
from partita.export.quantise.rounding import QUANTISERS
from partita.export.weights import pack

Array = npt.NDArray[np.generic]
CASES = ((4, 64, 4), (4, 64, 0), (8, 128, 4))
"""Bits, block, and accuracy level."""
ROUNDS = 7
SWIGLU: dict[str, Any] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
}


def _session(operator: str, inputs: dict[str, Array | None], attributes: dict[str, Any]) -> ort.InferenceSession:
    """One node over constants; x and scores are given when it runs."""
    kind = onnx.TensorProto.FLOAT
    names = ["x", "scores", *(name if array is not None else "" for name, array in inputs.items())]
    node = helper.make_node(
        operator, names, ["y"], domain="com.microsoft", normalize_routing_weights=1, **SWIGLU, **attributes
    )
    graph = helper.make_graph(
        [node],
        "experts",
        [helper.make_tensor_value_info(name, kind, ["t", f"{name} width"]) for name in ("x", "scores")],
        [helper.make_tensor_value_info("y", kind, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in inputs.items() if array is not None],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _packed(weights: Array, bits: int, block: int) -> tuple[Array, Array, Array, Array]:
    """Integers, scales and zero points of a stack [E, N, K] as QMoE reads them, and what they stand for."""
    count, rows, width = weights.shape
    blocks = torch.from_numpy(weights).reshape(-1, width // block, block)
    found = QUANTISERS["nearest"](blocks, Grid(bits, symmetric=False))
    restored = (found.integers.float() - found.zeros.float().unsqueeze(-1)) * found.scales.unsqueeze(-1)
    parts = (pack(found.integers.flatten(1), bits), found.scales, pack(found.zeros, bits))
    data, scales, zeros = (part.reshape(count, rows, -1).numpy() for part in parts)
    return data, scales, zeros, restored.reshape(weights.shape).numpy()


def _least(session: ort.InferenceSession, feeds: dict[str, Array]) -> float:
    """Milliseconds of CPU time."""
    session.run(None, feeds)
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        session.run(None, feeds)
        times.append(time.thread_time() - began)
    return 1e3 * min(times)


def main() -> None:
    """A row for float32 and for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 64), ("width", 1024), ("inner", 1024), ("chosen", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", default="1,128")
    asked = parser.parse_args()
    draw = np.random.default_rng(0)
    up, down = (
        (0.03 * draw.standard_normal(shape)).astype(np.float32)
        for shape in ((asked.experts, 2 * asked.inner, asked.width), (asked.experts, asked.width, asked.inner))
    )
    feeds: dict[int, dict[str, Array]] = {
        int(count): {
            "x": draw.standard_normal((int(count), asked.width), np.float32),
            "scores": draw.standard_normal((int(count), asked.experts), np.float32),
        }
        for count in asked.tokens.split(",")
    }

    def row(name: str, session: ort.InferenceSession, expected: list[Array] | None) -> list[Array]:
        found = [session.run(None, each)[0] for each in feeds.values()]
        off = [float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected or found, strict=True)]
        times = "".join(f"{_least(session, each):>10.2f}" for each in feeds.values())
        sys.stdout.write(f"{name:34}{times}{max(off):>12.1e}\n")
        return found

    head = "".join(f"{f'{count} tok ms':>10}" for count in feeds)
    sys.stdout.write(f"{'':34}{head}{'difference':>12}\n")
    k = {"k": asked.chosen}
    row("MoE, float32", _session("MoE", {"up": up, "": None, "down": down}, k), None)
    for bits, block, level in CASES:
        first, second = _packed(up, bits, block), _packed(down, bits, block)
        plain = _session("MoE", {"up": first[3], "": None, "down": second[3]}, k)
        expected = [plain.run(None, each)[0] for each in feeds.values()]
        del plain
        inputs: dict[str, Array | None] = {"up": first[0], "up scales": first[1], "": None}
        inputs |= {"down": second[0], "down scales": second[1]}
        inputs |= {f"{index}": None for index in range(4)} | {"up zeros": first[2], "down zeros": second[2]}
        packed = {"expert_weight_bits": bits, "block_size": block, "accuracy_level": level}
        row(f"QMoE, int{bits}, blocks of {block}, level {level}", _session("QMoE", inputs, {**k, **packed}), expected)


if __name__ == "__main__":
    main()
