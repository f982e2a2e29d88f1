"""Times products on the CPU provider for an export, in sessions of one each.

CPU time of one thread, in turns, the least of several rounds. Two models are run in turns so that other work on the
machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from partita.providers.resolve import Resolution
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.ort.session import Opening, PortInfo, open_native

FILE = Path("product.onnx")
"""Where a model would lie, were it a file."""
ROUNDS = 7
LEAST_ROUNDS = 3
SECONDS = 0.5
"""No further round is begun after this much CPU time, but for the first few."""
Question = tuple[bytes, Mapping[str, tuple[int, ...]]]
"""A model with inputs of float32 or float16 and one output, and the sizes of the inputs."""
HALF = "tensor(float16)"
COARSE = 1e-3
"""Clocks that tick in longer steps than this, in seconds, are of no use."""
TRIES = 3
"""What seems slower than the plain product is timed so often."""
Timed = tuple[str, Callable[[], Question]]
"""What tells a product from every other, and what makes its model: that is large, so only where it has to be timed."""
Pair = tuple[float, float]
"""Seconds of a run of a product, and of the plain one meanwhile."""
_KNOWN: dict[str, Pair] = {}
"""What was compared in this process."""


def compared(
    products: Sequence[Timed],
    plain: Timed,
    cpu: Resolution,
    seconds: Callable[[Sequence[Question], Resolution], Sequence[float]] | None = None,
) -> list[Pair]:
    """Times of each product and of the plain one. Raises what opening or running a session raises.

    What seems slower is timed again, and the best counts. `seconds`: times models in place of `product_seconds`.
    """
    names = [f"{name} beside {plain[0]}" for name, _ in products]
    again = [index for index, name in enumerate(names) if name not in _KNOWN]
    best: dict[int, Pair] = {}
    for _ in range(TRIES):
        if not again:
            break
        made = [products[index][1]() for index in again]
        *times, beside = (seconds or product_seconds)([*made, plain[1]()], cpu)
        for index, taken in zip(again, times, strict=True):
            best[index] = min(best.get(index, (taken, beside)), (taken, beside), key=_share)
        again = [index for index in again if _share(best[index]) > 1]
    _KNOWN.update({names[index]: pair for index, pair in best.items()})
    return [_KNOWN[name] for name in names]


def _share(pair: Pair) -> float:
    return pair[0] / pair[1]


def product_seconds(questions: Sequence[Question], cpu: Resolution) -> list[float]:
    """Seconds of CPU time that one run of each model takes on one thread.

    Raises NativeFailureError when a session cannot be opened, and what `Binding.run` raises.
    """
    # CPU time of this thread, the only one that computes; wall time where that ticks too coarsely.
    fine = time.get_clock_info("thread_time").resolution < COARSE
    clock = time.thread_time if fine else time.perf_counter
    with ExitStack() as stack:
        runs = [_bound(stack, model, sizes, cpu) for model, sizes in questions]
        best, began = [float("inf")] * len(runs), 0.0
        for number in range(ROUNDS + 1):
            for index, run in enumerate(runs):
                start = clock()
                run.run()
                if number:  # the first run makes what the others find
                    best[index] = min(best[index], max(clock() - start, 1e-9))
            if number == 0:
                began = clock()
            elif number >= LEAST_ROUNDS and clock() - began > SECONDS:
                break
        for run in runs:
            run.release()
    return best


def _bound(stack: ExitStack, model: bytes, sizes: Mapping[str, tuple[int, ...]], cpu: Resolution) -> Binding:
    """A session of a model with its inputs bound to random numbers, and its output."""
    session = stack.enter_context(closing(open_native(FILE, [cpu], Opening(threads=1, model=model))))
    binding = session.binding()
    for port in session.inputs:
        shape = sizes[port.name]
        buffer = host_buffer(shape, _dtype(port))
        buffer.host[:] = np.random.default_rng(0).standard_normal(shape, np.float32)
        binding.bind_input(port.name, buffer)
    for port in session.outputs:
        shape = tuple(size if isinstance(size, int) else 1 for size in port.shape)
        binding.bind_output(port.name, host_buffer(shape, _dtype(port)))
    return binding


def _dtype(port: PortInfo) -> str:
    """The element type of an input or output."""
    return "float16" if port.type == HALF else "float32"
