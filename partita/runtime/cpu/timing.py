"""Times GroupQueryAttention's two CPU paths in sessions of one node, and keeps what was found.

CPU time of one thread, in turns, the lowest of several rounds: other work on the machine distorts that little, and what
it does distort shows, because the lowest two do not agree then. Such timings are not kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from partita.files import replace
from partita.paths import cache_folder
from partita.providers.resolve import Resolution
from partita.runtime.cpu.attention import OPERATOR, VARIABLE, Form, Times
from partita.runtime.cpu.cores import cpu_identity
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.ort.registry import ort_build
from partita.runtime.ort.session import Opening, open_native

FORMAT = 2
"""To be raised when timings are made otherwise, so that old ones count for nothing."""
KIND = "attention"
"""Of what Partita keeps."""
ROUNDS = 7
LEAST_ROUNDS = 3
WORK = 512
"""So many tokens are computed on each path in a round: a prompt of a quarter has four runs. One alone has eight."""
SINGLES = 8
LOWEST = 3
"""Times of each that are kept."""
SECONDS = 0.3
"""No further round is begun after this much CPU time, but for the first few."""
COARSE = 1e-3
"""Clocks that tick in longer steps than this, in seconds, are of no use."""
FILE = Path("attention.onnx")
"""Where the model of one node would lie, were it a file."""


class Kept:
    """Timings of this machine and build; `path` None: kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.times = _read(path) if path is not None else {}

    def get(self, form: Form, lengths: tuple[int, ...]) -> Times | None:
        """The timing of a form at these lengths; None when there is none."""
        return self.times.get(_key(form, lengths))

    def put(self, form: Form, times: Times) -> None:
        """Keep a timing, beside those that other processes have kept meanwhile. What cannot be written is not."""
        key = _key(form, times.lengths)
        self.times[key] = times
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**_read(self.path), key: times}
            replace(self.path, json.dumps({"format": FORMAT, "times": {name: asdict(t) for name, t in merged.items()}}))


_IN_MEMORY: dict[Path | None, Kept] = {}


def kept_timings() -> Kept:
    """Those of this processor and this build of ONNX Runtime."""
    path = file_of_machine(KIND, FORMAT)
    if path is None:
        return _IN_MEMORY.setdefault(None, Kept(None))
    return Kept(path)


def file_of_machine(kind: str, version: int) -> Path | None:
    """Where timings of a kind are kept for this processor and this build of ONNX Runtime; None where nothing is."""
    build = asdict(ort_build())
    build.pop("folder")
    identity = json.dumps([version, build, cpu_identity()], sort_keys=True)
    folder = cache_folder(kind)
    return None if folder is None else folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _key(form: Form, lengths: Sequence[int]) -> str:
    return f"{form.key} at {','.join(map(str, lengths))}"


def _read(path: Path) -> dict[str, Times]:
    """The timings in a file; none when it cannot be read, or is not ours."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            return {}
        return {str(key): _times_of(value) for key, value in raw["times"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _times_of(value: Mapping[str, Any]) -> Times:
    """Timings as JSON has them. Raises ValueError or TypeError for what is none."""
    lengths = tuple(int(length) for length in value["lengths"])
    flash, naive = (tuple(tuple(float(t) for t in rounds) for rounds in value[name]) for name in ("flash", "naive"))
    good = all(
        len(path) == len(lengths) and all(rounds and min(rounds) > 0 for rounds in path) for path in (flash, naive)
    )
    if not good or not lengths:
        raise ValueError("no timings")
    return Times(lengths, flash, naive)


def times_of(
    form: Form, lengths: tuple[int, ...], cpu: Resolution, kept: Kept, measured: Callable[..., Times] | None = None
) -> tuple[Times, bool]:
    """Times of a form, and whether they are of an earlier session. Raises what opening or running a session raises.

    `measured`: measures in place of `measure`.
    """
    known = kept.get(form, lengths)
    if known is not None:
        return known, True
    found = (measured or measure)(form, lengths, cpu)
    if found.steady:
        kept.put(form, found)
    return found, False


def measure(form: Form, lengths: tuple[int, ...], cpu: Resolution) -> Times:
    """Time both paths of a form for prompts of these lengths, 1 for a token after the longest; some tenths of a second.

    Raises NativeFailureError when a session cannot be opened, and what `Binding.run` raises.
    """
    clock = thread_clock()
    rounds: list[list[list[float]]] = [[[] for _ in lengths] for _ in range(2)]
    with ExitStack() as stack:
        runs = [_bound(stack, form, lengths, cpu, naive=naive) for naive in (False, True)]
        began = clock()
        for number in range(ROUNDS + 1):
            for place in range(len(lengths)):
                for path in (0, 1) if number % 2 else (1, 0):
                    for _ in range(max(1, min(SINGLES, WORK // lengths[place])) if number else 1):
                        start = clock()
                        runs[path][place].run()
                        rounds[path][place].append(max(clock() - start, 1e-9))
            if number == 0:
                began = clock()
            elif number >= LEAST_ROUNDS and clock() - began > SECONDS:
                break
        for bindings in runs:
            for binding in bindings:
                binding.release()
    flash, naive = (tuple(tuple(sorted(times)[:LOWEST]) for times in path) for path in rounds)
    return Times(lengths, flash, naive)


def thread_clock() -> Callable[[], float]:
    """CPU time of this thread, which is the only one to compute; wall time where that ticks too coarsely."""
    fine = time.get_clock_info("thread_time").resolution < COARSE
    return time.thread_time if fine else time.perf_counter


def _bound(stack: ExitStack, form: Form, lengths: Sequence[int], cpu: Resolution, *, naive: bool) -> list[Binding]:
    """A session on one path, and a binding per length."""
    length = max(lengths)
    opening = Opening(threads=1, model=_model(form, length), environment={VARIABLE: "1" if naive else "0"})
    session = stack.enter_context(closing(open_native(FILE, [cpu], opening)))
    bindings = []
    for tokens in lengths:
        binding = session.binding()
        cache = (1, form.kv_heads, form.rows(length), form.head_size)
        shapes: dict[str, tuple[int, ...]] = {"past_key": cache, "past_value": cache}
        widths = {"query": form.heads, "key": form.kv_heads, "value": form.kv_heads}
        shapes |= {name: (1, tokens, heads * form.head_size) for name, heads in widths.items()}
        for name, shape in shapes.items():
            buffer = host_buffer(shape, "float32")
            buffer.host[:] = np.random.default_rng(0).standard_normal(shape, np.float32)
            binding.bind_input(name, buffer)
            if name.startswith("past"):
                binding.bind_output(name.replace("past", "present"), buffer)
        total = length if tokens == 1 else tokens
        for name, rank, value in (("last", 1, total - 1), ("total", 0, total)):
            buffer = host_buffer((1,) * rank, "int32")
            buffer.host[...] = value
            binding.bind_input(name, buffer)
        binding.bind_output("output", host_buffer((1, tokens, form.heads * form.head_size), "float32"))
        bindings.append(binding)
    return bindings


def _model(form: Form, length: int) -> bytes:
    """A model with the node alone, its cache of `length` tokens in place."""
    from onnx import TensorProto, helper

    def port(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, list(shape))

    cache, widths = (1, form.kv_heads, form.rows(length), form.head_size), (form.heads, form.kv_heads, form.kv_heads)
    inputs = [
        port(name, 1, "tokens", heads * form.head_size)
        for name, heads in zip(("query", "key", "value"), widths, strict=True)
    ]
    inputs += [port(name, *cache) for name in ("past_key", "past_value")]
    inputs += [port("last", 1, kind=TensorProto.INT32), port("total", kind=TensorProto.INT32)]
    outputs = [port("output", 1, "tokens", form.heads * form.head_size)]
    outputs += [port(name, *cache) for name in ("present_key", "present_value")]
    told: dict[str, Any] = {"local_window_size": form.window or -1}
    if form.rolls:
        told["sliding_window_cache"] = 1
    node = helper.make_node(
        OPERATOR,
        [entry.name for entry in inputs],
        [entry.name for entry in outputs],
        name="attention",
        domain="com.microsoft",
        num_heads=form.heads,
        kv_num_heads=form.kv_heads,
        **told,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs), opset_imports=opsets, ir_version=10
    )
    return bytes(model.SerializeToString())
