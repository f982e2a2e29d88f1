"""Times one product of packed weights in every form, on the CPU provider of this machine.

    python -m tools.integer_products [--width 2048] [--tokens 1,8,128] [--threads 1]

What `--precision int8 --activations int8` is worth depends on the machine: ONNX Runtime has a matrix unit for integers
(AMX) in its product of integers alone, and not in MatMulNBits. Sessions are of one product, interleaved; the figure is
the least of all rounds. It takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from partita.export.quantise.form_probes import product_model
from partita.export.quantise.forms import form
from partita.export.quantise.quantisers import Grid
from partita.export.quantise.write.weight_source import Packing
from partita.export.target import Kernels

CASES = (
    ("matmul_nbits", 4, 32),
    ("matmul_nbits", 4, 64),
    ("matmul_nbits", 8, 128),
    ("dequantize_linear", 4, 64),
    ("dequantize_linear", 8, 128),
    ("matmul_integer", 8, 0),
    ("matmul_integer_to_float", 8, 0),
)
"""Form, bits, and block; 0: a whole row."""
FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni")
ROUNDS, RUNS = 9, 5


def _floats(tokens: int, width: int) -> bytes:
    """The same product of float32."""
    weight = onnx.numpy_helper.from_array(np.zeros((width, width), np.float32), "w")
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "floats",
        [helper.make_tensor_value_info("x", kind, [1, tokens, width])],
        [helper.make_tensor_value_info("y", kind, [1, tokens, width])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def _session(model: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def measure(tokens: int, width: int, threads: int) -> dict[str, float]:
    """Seconds of one product, by what multiplies."""
    sessions = {"float32 MatMul": _session(_floats(tokens, width), threads)}
    for name, bits, block in CASES:
        found = form(name)
        packing = Packing(Grid(bits, found.one_scale), block or width, "nearest")
        model = product_model(found, Kernels(), [packing], "float32", tokens=tokens, width=width)
        sessions[f"{name} int{bits}, {f'blocks of {block}' if block else 'one scale a row'}"] = _session(model, threads)
    x = np.random.default_rng(0).standard_normal((1, tokens, width)).astype(np.float32)
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            session.run(None, {"x": x})
            begun = time.perf_counter()
            for _ in range(RUNS):
                session.run(None, {"x": x})
            best[name] = min(best[name], (time.perf_counter() - begun) / RUNS)
    return best


def main() -> None:
    """Print a line for every form and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", default="1,8,128")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    info = Path("/proc/cpuinfo")
    known = set(info.read_text().split()) if info.is_file() else set()
    units = ", ".join(flag for flag in FLAGS if flag in known) or "none of " + ", ".join(FLAGS)
    sys.stdout.write(f"integer units: {units}\n")
    for tokens in map(int, given.tokens.split(",")):
        sys.stdout.write(f"{tokens} tokens, weight of {given.width} x {given.width}, {given.threads} threads\n")
        for name, seconds in measure(tokens, given.width, given.threads).items():
            rate = 2 * tokens * given.width**2 / seconds / 1e9
            sys.stdout.write(f"  {name:<44} {1e6 * seconds:10.1f} us  {rate:8.1f} GFLOP/s\n")


if __name__ == "__main__":
    main()
