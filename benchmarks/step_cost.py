"""`python -m benchmarks.step_cost PACKAGE`: microseconds of Python per decode step, beside ONNX Runtime's runs.

CPU time of this process between the end of one run and the beginning of the next, medians; greedy, batch 1, one thread,
and nothing profiled. Three ways: the least that a loop can do, the loop of the engine alone, and `partita.load` with
text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime as ort

from benchmarks.bare_loop import BareLoop

PROMPT = [1, 45, 7, 300, 12, 9, 77, 5]


@contextmanager
def gaps() -> Iterator[list[int]]:
    """Nanoseconds of CPU time between the runs that are made inside of it."""
    found: list[int] = []
    native, ended = ort.InferenceSession.run_with_iobinding, 0

    def run(session: Any, *arguments: Any) -> None:
        nonlocal ended
        began = time.process_time_ns()
        if ended:
            found.append(began - ended)
        native(session, *arguments)
        ended = time.process_time_ns()

    ort.InferenceSession.run_with_iobinding = run
    try:
        yield found
    finally:
        ort.InferenceSession.run_with_iobinding = native


def bare(folder: Path, tokens: int) -> Callable[[], object]:
    """Buffers bound once, one run per token, argmax."""
    loop = BareLoop(folder, threads=1)
    return lambda: loop.run(PROMPT, tokens)


def engine(folder: Path, tokens: int) -> Callable[[], object]:
    """The steps of the engine, without text."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.runner import load_runner
    from partita.runtime.generate.steps import generate

    runner = load_runner(folder, parse_chain("cpu"), threads=1)
    rows = runner.contract.batch_size
    return lambda: [*generate(runner, [PROMPT] * rows, max_new_tokens=tokens, sampler=greedy)]


def library(folder: Path, tokens: int) -> Callable[[], object]:
    """`partita.load(...).generate(...)`, with text."""
    import partita

    model = partita.load(folder, "cpu", threads=1, process="this", observe=False)
    text = "The list has no more elements, and "
    return lambda: [*model.generate(text, max_new_tokens=tokens, stop_token_ids=())]


WAYS = {"bare loop": bare, "engine": engine, "library": library}


def main() -> None:
    """Print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for name, way in WAYS.items():
        generate = way(given.package, given.tokens)
        for _ in range(2):
            generate()
        with gaps() as found:
            for _ in range(given.rounds):
                generate()
        found.sort()
        print(
            f"{name:10} {statistics.median(found) / 1000:7.1f} us median, {found[len(found) // 10] / 1000:7.1f} us p10"
        )


if __name__ == "__main__":
    main()
