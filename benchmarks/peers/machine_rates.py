"""What the machine gives: bytes per second read, and float32 and int8 products, with the threads that everybody has.

`python -m benchmarks.peers.machine_rates THREADS PROVIDER` prints it as JSON: a process of its own takes its
memory along.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
from onnx import TensorProto, helper

from benchmarks.peers.records import Machine

BUFFER_BYTES = 1 << 30
"""More than a last-level cache; virtual machines are told that of the whole host."""
ROUNDS = 5
ROWS, WIDTH = 128, 2048


def measured(threads: int, provider: str = "cpu") -> Machine:
    """The rates, from a child process; raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "benchmarks.peers.machine_rates", str(threads), provider]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Machine.model_validate_json(done.stdout)


def measure(threads: int, provider: str) -> Machine:
    """All of it, here and now."""
    gpu, gpu_copy = gpu_rate() if provider == "cuda" else (None, None)
    flags = _proc("/proc/cpuinfo")
    name = next((line.partition(":")[2].strip() for line in flags.splitlines() if line.startswith("model name")), "")
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = None
    gemm, gemm_work = matmul(ROWS, WIDTH, WIDTH, threads), 2 * ROWS * WIDTH * WIDTH
    integer = integer_matmul(ROWS, WIDTH, WIDTH, threads)
    rows = BUFFER_BYTES // 4 // WIDTH
    return Machine(
        processor=name or platform.processor() or platform.machine(),
        cores=psutil.cpu_count(logical=False) or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        threads=threads,
        load_average=load,
        read_gbps=read_rate(threads),
        gemv_gbps=BUFFER_BYTES / _best(matmul(1, WIDTH, rows, threads)) / 1e9,
        gemm_gflops=gemm_work / _best(gemm) / 1e9,
        int8_gops=gemm_work / _best(integer) / 1e9,
        matrix_unit="amx_int8" in flags,
        gpu=gpu,
        gpu_copy_gbps=gpu_copy,
    )


def gpu_rate() -> tuple[str, float]:
    """Name of the GPU, and 1e9 bytes per second of a copy within its memory, read and written ones counted."""
    import torch

    one = torch.ones(BUFFER_BYTES // 4, device="cuda")
    other = torch.empty_like(one)

    def copy() -> None:
        other.copy_(one)
        torch.cuda.synchronize()

    return torch.cuda.get_device_name(), 2 * BUFFER_BYTES / _best(copy) / 1e9


def _proc(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _best(run: Callable[[], object]) -> float:
    """The shortest of some seconds of runs: what the machine gives when nothing disturbs it."""
    run()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def read_rate(threads: int) -> float:
    """1e9 bytes per second; numpy's reductions release the lock, so that each thread reads a slice."""
    buffer = np.ones(BUFFER_BYTES // 4, np.float32)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        return BUFFER_BYTES / _best(lambda: list(pool.map(lambda part: float(part.max()), parts))) / 1e9


def matmul(rows: int, inner: int, columns: int, threads: int) -> Callable[[], object]:
    """A run of one float32 MatMul in ONNX Runtime."""
    weight = np.full((inner, columns), 0.5, np.float32)
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    return _runner(node, np.ones((rows, inner), np.float32), weight, TensorProto.FLOAT, threads)


def integer_matmul(rows: int, inner: int, columns: int, threads: int) -> Callable[[], object]:
    """A run of one MatMulInteger, uint8 by int8: the form that matrix units take."""
    weight = np.full((inner, columns), 3, np.int8)
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    return _runner(node, np.ones((rows, inner), np.uint8), weight, TensorProto.INT32, threads)


def _runner(node: Any, left: Any, weight: Any, result: int, threads: int) -> Callable[[], object]:
    # The weight is given to the session, not written into the model: a message is limited to 2 GiB.
    constant = onnx.TensorProto(
        name="b", data_type=_type(weight), dims=weight.shape, data_location=TensorProto.EXTERNAL
    )
    constant.external_data.add(key="location", value="rate")
    constant.external_data.add(key="length", value=str(weight.nbytes))
    graph = helper.make_graph(
        [node],
        "rate",
        [helper.make_tensor_value_info("a", _type(left), left.shape)],
        [helper.make_tensor_value_info("y", result, (left.shape[0], weight.shape[1]))],
        [constant],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    value = ort.OrtValue.ortvalue_from_numpy(weight)
    options.add_external_initializers(["b"], [value])
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(kept: Any = value) -> object:
        return session.run(None, {"a": left})

    return run


def _type(array: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), sys.argv[2]).model_dump_json())
