"""Measures what this machine reaches with ONNX Runtime's CPU provider: bandwidth, products, attention, overhead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import helper, numpy_helper, parser

from partita.capacity.costs import packed_bytes
from partita.capacity.records import FormRates, MachineRates
from partita.process import give_back, rss_bytes

SECONDS, LEAST_RUNS = 0.1, 5
"""Time limit and minimum number of the timed runs of one graph."""
WIDTH, SMALL_WIDTH, LARGE_WIDTH, ROWS = 1024, 256, 4096, 256
STREAMED_BYTES = 128 << 20
SET_BYTES = (6 << 20, 24 << 20, STREAMED_BYTES)
"""Bytes of all matrices of a session: from sets that a cache holds to sets that none holds."""
NODES, PARTS = 64, 8
BLOCKS = {4: 64, 8: 128}
"""Bits -> weights per scale: the defaults of an export for the CPU provider."""
HEADS, KV_HEADS, HEAD_SIZE, LENGTH, TOTAL = 12, 2, 64, 2048, 1024
TYPES = {"float32": "float", "int32": "int32"}
OPSETS = (helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1))
Array = npt.NDArray[Any]


def measure(threads: int, audience: object = None) -> MachineRates:
    """The figures, in ten seconds. The caller sets the environment variable of the attention path."""
    import partita.runtime.generate.loop
    import partita.runtime.generate.runner  # noqa: F401 - a run has them in memory

    adds = " ".join(f"y{at + 1} = Add(y{at}, y{at})" for at in range(NODES))
    node_seconds = _fastest(_open(threads, adds, {"y0": np.ones((1, WIDTH), np.float32)}, f"y{NODES}")) / NODES
    steps, prompts = _attention(threads, 1), _attention(threads, ROWS)
    _fastest(_chain(threads, 4, WIDTH, 4, ROWS))
    give_back()
    base = rss_bytes()  # with the code and buffers of kernels that ran
    square, cube = (np.ones(shape, np.float32) for shape in ((ROWS, WIDTH), (64, STREAMED_BYTES >> 8)))
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    reading = _fastest(_open(threads, "y = ReduceMax(x, axes)", {"x": cube}, "y", [axes]))
    return MachineRates(
        threads=threads,
        onnxruntime=str(ort.__version__),
        read_bytes_per_second=cube.nbytes / reading,
        elementwise_bytes_per_second=2 * square.nbytes / _fastest(_open(threads, "y = Mul(x, x)", {"x": square}, "y")),
        forms={"float32": _form(threads, 32), **{f"int{bits}": _form(threads, bits) for bits in BLOCKS}},
        attention_decode_flops=steps,
        attention_prefill_flops=prompts,
        node_seconds=node_seconds,
        process_bytes=base,
    )


def _fastest(*runs: Callable[[], object]) -> float:
    """Sum of the seconds of the fastest call of each, in turns, after a first round that is not counted.

    Other processes only make calls slower, and short calls are rarely interrupted.
    """
    rounds: list[list[float]] = []
    until = time.perf_counter() + SECONDS * len(runs)
    while len(rounds) <= LEAST_RUNS or time.perf_counter() < until:
        times = [time.perf_counter()]
        for run in runs:
            run()
            times.append(time.perf_counter())
        rounds.append([after - before for before, after in pairwise(times)])
    return float(sum(min(times) for times in zip(*rounds[1:], strict=True)))


def _open(
    threads: int,
    nodes: str,
    feeds: Mapping[str, Array],
    output: str,
    weights: Sequence[Any] = (),
    in_place: Mapping[str, str] | None = None,
) -> Callable[[], object]:
    """A function that runs a graph. `nodes`: in ONNX's text format. `in_place`: outputs written over an input."""
    shapes = {name: ",".join(map(str, value.shape)) for name, value in feeds.items()}
    ports = ", ".join(f"{TYPES[value.dtype.name]}[{shapes[name]}] {name}" for name, value in feeds.items())
    outputs = ", ".join(f"float[{shapes.get(name, 'a,b')}] {name}" for name in (output, *(in_place or {})))
    graph = parser.parse_graph(f"rates ({ports}) => ({outputs}) {{ {nodes} }}")
    graph.initializer.extend(weights)
    for port in graph.output:
        port.type.tensor_type.ClearField("shape")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output(output)
    for name, source in (in_place or {}).items():
        binding.bind_output(name, "cpu", 0, np.float32, feeds[source].shape, feeds[source].ctypes.data)
    return lambda: session.run_with_iobinding(binding)


def _form(threads: int, bits: int) -> FormRates:
    """The rates of products with weights of these bits."""
    size, large = (
        4 * width * width if bits == 32 else packed_bytes(width, width, bits, BLOCKS[bits])
        for width in (WIDTH, LARGE_WIDTH)
    )
    counts = [max(1, amount // size) for amount in SET_BYTES]
    gemv = {}
    for count in counts:  # sessions in turns: all of their weights together are the set
        parts = [part for part in (count // PARTS,) * PARTS if part] or [count]
        seconds = _fastest(*(_chain(threads, bits, WIDTH, part) for part in parts))
        gemv[sum(parts) * size] = sum(parts) * size / seconds
    rows = _fastest(_chain(threads, bits, WIDTH, counts[0], ROWS))
    several = max(2, STREAMED_BYTES // large)
    return FormRates(
        gemv_bytes_per_second=gemv,
        product_bytes=(size, large),
        large_gemv_bytes_per_second=several * large / _fastest(_chain(threads, bits, LARGE_WIDTH, several)),
        gemm_flops=2 * counts[0] * WIDTH * WIDTH * ROWS / rows,
        product_seconds=_fastest(_chain(threads, bits, SMALL_WIDTH, NODES)) / NODES,
    )


def _chain(threads: int, bits: int, width: int, count: int, rows: int = 1) -> Callable[[], object]:
    """A function that runs `count` products with square matrices, one after the other."""
    nodes, weights = [], []
    for at in range(count):
        arrays = _matrix(bits, width)
        for array in arrays[:2]:
            array.flat[0] = at % 256  # ONNX Runtime keeps equal weights once
        names = [f"w{at}_{part}" for part in range(len(arrays))]
        weights += [numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True)]
        settings = f"<K={width}, N={width}, bits={bits}, block_size={BLOCKS.get(bits)}, accuracy_level=4>"
        operator = "MatMul" if bits == 32 else f"com.microsoft.MatMulNBits {settings}"
        nodes.append(f"y{at + 1} = {operator} (y{at}, {', '.join(names)})")
    return _open(threads, " ".join(nodes), {"y0": np.ones((rows, width), np.float32)}, f"y{count}", weights)


def _matrix(bits: int, width: int) -> list[Array]:
    """A square matrix; of integers with scales and zero points."""
    if bits == 32:
        return [np.full((width, width), 1e-3, np.float32)]
    size = BLOCKS[bits]
    blocks = width // size
    packed = np.full((width, blocks, size * bits // 8), 0x77, np.uint8)
    points = np.full((width, -(-blocks * bits // 8)), 0x66, np.uint8)
    return [packed, np.full((width, blocks), 1e-3, np.float32), points]


def _attention(threads: int, tokens: int) -> float:
    """Arithmetic per second of attention, for the last `tokens` of 1,024."""
    widths = {"q": HEADS * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}
    feeds: dict[str, Array] = {name: np.ones((1, tokens, width), np.float32) for name, width in widths.items()}
    feeds |= {name: np.ones((1, KV_HEADS, LENGTH, HEAD_SIZE), np.float32) for name in ("pk", "pv")}
    feeds |= {"last": np.array([TOTAL - 1], np.int32), "total": np.array(TOTAL, np.int32)}
    operator = f"com.microsoft.GroupQueryAttention <num_heads={HEADS}, kv_num_heads={KV_HEADS}>"
    node = f"y, nk, nv = {operator} ({', '.join(feeds)})"
    seconds = _fastest(_open(threads, node, feeds, "y", in_place={"nk": "pk", "nv": "pv"}))
    return 4 * HEADS * HEAD_SIZE * tokens * (TOTAL - (tokens - 1) / 2) / seconds
