"""Times products on the CPU provider, in sessions of one each: which form of packed weights is the fastest here.

CPU time of one thread, in turns, the least of several rounds, as the paths of attention are timed (`timing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from partita.providers.resolve import Resolution
from partita.runtime.cpu.timing import thread_clock
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


def product_seconds(questions: Sequence[Question], cpu: Resolution) -> list[float]:
    """Seconds of CPU time that one run of each model takes on one thread.

    Raises NativeFailureError when a session cannot be opened, and what `Binding.run` raises.
    """
    clock = thread_clock()
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
