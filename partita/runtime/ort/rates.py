"""Measures what this machine reaches with ONNX Runtime's CPU provider: bandwidth, products, attention, overhead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from partita.capacity.costs import packed_bytes
from partita.capacity.records import FormRates, MachineRates
from partita.process import give_back, rss_bytes
from partita.runtime.ort.buffers import NATIVE_ERRORS

SECONDS, LEAST_RUNS = 0.15, 5
"""Time limit and minimum number of the timed runs of one figure."""
WIDTH, SMALL_WIDTH = 1024, 256
STREAMED_BYTES = 128 << 20
SET_BYTES = (6 << 20, 24 << 20, STREAMED_BYTES)
"""Bytes of all matrices of a session: from sets that a cache holds to sets that none holds."""
SMALL_PRODUCTS = 64
GEMM_ROWS = 256
BLOCKS = {4: 64, 8: 128}
"""Bits -> weights per scale: the defaults of an export for the CPU provider."""
HEADS, KV_HEADS, HEAD_SIZE, LENGTH, PAST, CHUNK = 12, 2, 64, 2048, 1023, 256
ADDS = 200
FLOAT = TensorProto.FLOAT


def measure(threads: int, *, naive: bool) -> MachineRates:
    """The figures, in a few seconds. `naive`: the attention path is that of `cpu.attention=naive`, whose environment
    variable the caller sets. Raises the errors of ONNX Runtime as RuntimeError.
    """
    began = time.perf_counter()
    try:
        per_node, base = _overhead(threads)
        forms = {
            "float32": _form(threads, _float_matrix, 4 * WIDTH * WIDTH),
            **{
                f"int{bits}": _form(threads, _packed_matrix(bits), packed_bytes(WIDTH, WIDTH, bits, size))
                for bits, size in BLOCKS.items()
            },
        }
        return MachineRates(
            threads=threads,
            onnxruntime=str(ort.__version__),
            read_bytes_per_second=_read(threads),
            elementwise_bytes_per_second=_elementwise(threads),
            forms=forms,
            attention_decode_flops=_attention(threads, 1),
            attention_prefill_flops=_attention(threads, CHUNK),
            naive_attention=naive,
            node_seconds=per_node,
            process_bytes=base,
            seconds=round(time.perf_counter() - began, 2),
        )
    except NATIVE_ERRORS as error:
        raise RuntimeError(f"the speed of this machine cannot be measured: {error}") from error


def _session(threads: int, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Any) -> Any:
    graph = helper.make_graph(list(nodes), "rates", list(inputs), list(outputs), list(weights))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest call, after one that is not counted: other processes only make calls slower."""
    run()
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < LEAST_RUNS or time.perf_counter() < until:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def _timed(session: Any, feeds: Mapping[str, npt.NDArray[Any]]) -> float:
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for port in session.get_outputs():
        binding.bind_output(port.name)
    return _fastest(lambda: session.run_with_iobinding(binding))


def _port(name: str, shape: Sequence[int | str], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _overhead(threads: int) -> tuple[float, int]:
    """Seconds of one small node, and resident memory of the process with a session of small nodes."""
    nodes = [helper.make_node("Add", [f"y{at}", "one"], [f"y{at + 1}"]) for at in range(ADDS)]
    one = numpy_helper.from_array(np.ones(WIDTH, np.float32), "one")
    ports = [_port("y0", [1, WIDTH])], [_port(f"y{ADDS}", [1, WIDTH])]
    session = _session(threads, nodes, *ports, [one])
    seconds = _timed(session, {"y0": np.zeros((1, WIDTH), np.float32)})
    give_back()
    return seconds / ADDS, rss_bytes()


def _read(threads: int) -> float:
    """Bytes per second that all threads read from memory."""
    values = np.ones((64, STREAMED_BYTES // 256), np.float32)
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"])
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    session = _session(threads, [node], [_port("x", values.shape)], [_port("y", [64, 1])], [axes])
    return values.nbytes / _timed(session, {"x": values})


def _elementwise(threads: int) -> float:
    """Bytes per second that a product of two activations reads and writes."""
    values = np.ones((GEMM_ROWS, 2 * WIDTH), np.float32)
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    session = _session(threads, [node], [_port("x", values.shape)], [_port("y", values.shape)], [])
    return 2 * values.nbytes / _timed(session, {"x": values})


Matrix = Callable[[int, int, str, str], tuple[Any, list[Any]]]
"""Number, width, names of input and output -> the node of a product with a square matrix, and its weights."""


def _float_matrix(number: int, width: int, source: str, result: str) -> tuple[Any, list[Any]]:
    values = np.full((width, width), 1e-3, np.float32)
    values[0, 0] = number  # ONNX Runtime keeps equal weights once
    name = f"w{number}"
    return helper.make_node("MatMul", [source, name], [result]), [numpy_helper.from_array(values, name)]


def _packed_matrix(bits: int) -> Matrix:
    def make(number: int, width: int, source: str, result: str) -> tuple[Any, list[Any]]:
        size = BLOCKS[bits]
        blocks = width // size
        weights: dict[str, npt.NDArray[Any]] = {
            "w": np.full((width, blocks, size * bits // 8), 0x77, np.uint8),
            "s": np.full((width, blocks), 1e-3, np.float32),
            "z": np.full((width, -(-blocks * bits // 8)), 0x66, np.uint8),
        }
        weights["s"].flat[0] = weights["w"].flat[0] = number % 256
        names = [f"{part}{number}" for part in weights]
        settings: dict[str, Any] = {"K": width, "N": width, "bits": bits, "block_size": size, "accuracy_level": 4}
        node = helper.make_node("MatMulNBits", [source, *names], [result], domain="com.microsoft", **settings)
        return node, [numpy_helper.from_array(each, name) for each, name in zip(weights.values(), names, strict=True)]

    return make


def _form(threads: int, matrix: Matrix, size: int) -> FormRates:
    """The rates of products with matrices of `size` bytes each."""
    one, rows, small = (np.ones(shape, np.float32) for shape in ((1, WIDTH), (GEMM_ROWS, WIDTH), (1, SMALL_WIDTH)))
    gemv = {}
    for amount in SET_BYTES:
        count = max(1, amount // size)
        session = _chain(threads, matrix, count, WIDTH)
        gemv[count * size] = count * size / _timed(session, {"y0": one})
        if amount == SET_BYTES[0]:
            gemm = 2 * count * WIDTH * WIDTH * GEMM_ROWS / _timed(session, {"y0": rows})
    session = _chain(threads, matrix, SMALL_PRODUCTS, SMALL_WIDTH)
    return FormRates(
        gemv_bytes_per_second=gemv,
        gemm_flops=gemm,
        product_seconds=_timed(session, {"y0": small}) / SMALL_PRODUCTS,
    )


def _chain(threads: int, matrix: Matrix, count: int, width: int) -> Any:
    """A session with `count` products, one after the other."""
    made = [matrix(at, width, f"y{at}", f"y{at + 1}") for at in range(count)]
    ports = [_port("y0", ["rows", width])], [_port(f"y{count}", ["rows", width])]
    return _session(threads, [node for node, _ in made], *ports, [each for _, weights in made for each in weights])


def _attention(threads: int, tokens: int) -> float:
    """Arithmetic per second of attention, of `tokens` new tokens after others."""
    past = PAST if tokens == 1 else LENGTH // 2 - tokens
    total = past + tokens
    shape = [1, KV_HEADS, LENGTH, HEAD_SIZE]
    inputs = ["q", "k", "v", "pk", "pv", "last", "total"]
    node = helper.make_node(
        "GroupQueryAttention", inputs, ["y", "nk", "nv"], domain="com.microsoft", num_heads=HEADS, kv_num_heads=KV_HEADS
    )
    widths = {"q": HEADS * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}
    ports = [_port(name, [1, tokens, width]) for name, width in widths.items()]
    ports += [_port(name, shape) for name in ("pk", "pv")]
    ports += [_port("last", [1], TensorProto.INT32), _port("total", [], TensorProto.INT32)]
    outputs = [_port("y", [1, tokens, widths["q"]]), _port("nk", shape), _port("nv", shape)]
    session = _session(threads, [node], ports, outputs, [])
    feeds = {name: np.ones((1, tokens, width), np.float32) for name, width in widths.items()}
    caches = {name: np.ones(shape, np.float32) for name in ("pk", "pv")}
    counts = {"last": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
    binding = session.io_binding()
    for name, value in {**feeds, **caches, **counts}.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("y")
    for name, present in (("nk", "pk"), ("nv", "pv")):  # in place, as in a package
        binding.bind_output(name, "cpu", 0, np.float32, shape, caches[present].ctypes.data)
    seconds = _fastest(lambda: session.run_with_iobinding(binding))
    return 4 * HEADS * HEAD_SIZE * tokens * (past + (tokens + 1) / 2) / seconds
