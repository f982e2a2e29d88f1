"""`python -m benchmarks.step_cost PACKAGE`: microseconds of Python per decode step, beside ONNX Runtime's runs.

CPU time of this process and Python function calls between the end of one run and the beginning of the next, medians;
greedy, batch 1, one thread, and nothing profiled. Three ways: the least that a loop can do, the loop of the engine
alone, and `partita.load` with text. Then the wall time that a worker process adds to each token of `partita.load`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from partita.package.folder import read_manifest

PROMPT = [1, 45, 7, 300, 12, 9, 77, 5]


@contextmanager
def gaps() -> Iterator[list[int]]:
    """Nanoseconds of CPU time between the runs that are made inside of it."""
    found: list[int] = []
    ended = 0

    def before() -> None:
        began = time.process_time_ns()
        if ended:
            found.append(began - ended)

    def after() -> None:
        nonlocal ended
        ended = time.process_time_ns()

    with _around_runs(before, after):
        yield found


@contextmanager
def calls() -> Iterator[list[int]]:
    """Python function calls between the runs that are made inside of it."""
    found: list[int] = []
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event == "call"

    def before() -> None:
        sys.setprofile(None)
        found.append(made - 2)  # without this function and the one that calls it

    def after() -> None:
        nonlocal made
        made = 0
        sys.setprofile(count)

    with _around_runs(before, after):
        yield found
    sys.setprofile(None)


@contextmanager
def _around_runs(before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    native = ort.InferenceSession.run_with_iobinding

    def run(session: Any, *arguments: Any) -> None:
        before()
        native(session, *arguments)
        after()

    ort.InferenceSession.run_with_iobinding = run
    try:
        yield
    finally:
        ort.InferenceSession.run_with_iobinding = native


class BareLoop:
    """The least a Python loop can do with an exported graph: buffers bound once, one run per token, argmax.

    It shares no code with the engine: only the manifest tells it what to feed. Of a gqa package with batch 1 in fp32.
    """

    def __init__(self, folder: Path) -> None:
        graph = read_manifest(folder).graph
        self.states = graph.states
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.vocab_size = graph.vocab_size
        declared = {port.name: port.type for port in self.session.get_inputs()}
        self.names = frozenset(declared)
        self.positions = np.int32 if declared.get("position_ids") == "tensor(int32)" else np.int64
        self.cache = [self._value(np.zeros(s.shape, np.float32)) for s in self.states]

    @staticmethod
    def _value(array: Any) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(array)

    def _bind(self, length: int) -> tuple[Any, dict[str, Any]]:
        arrays = {
            "input_ids": np.zeros((1, length), np.int64),
            "position_ids": np.zeros((1, length), self.positions),
            "logits_indices": np.array([length - 1], np.int64),
            "seqlens_k": np.zeros(1, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
            "logits": np.zeros((1, 1, self.vocab_size), np.float32),
        }
        binding = self.session.io_binding()
        self._keep = [self._value(a) for a in arrays.values()]
        for (name, _), value in zip(arrays.items(), self._keep, strict=True):
            if name != "logits" and name not in self.names:
                continue
            (binding.bind_ortvalue_output if name == "logits" else binding.bind_ortvalue_input)(name, value)
        for state, value in zip(self.states, self.cache, strict=True):
            binding.bind_ortvalue_input(state.past, value)
            binding.bind_ortvalue_output(state.present, value)
        return binding, arrays

    def run(self, prompt: list[int], new_tokens: int) -> None:
        """Prefill `prompt` in one run, then decode greedily."""
        length = len(prompt)
        binding, arrays = self._bind(length)
        arrays["input_ids"][0] = prompt
        arrays["position_ids"][0] = np.arange(length)
        arrays["seqlens_k"][0], arrays["total_sequence_length"][()] = length - 1, length
        self.session.run_with_iobinding(binding)
        token = int(arrays["logits"][0, 0].argmax())
        binding, arrays = self._bind(1)
        ids, positions = arrays["input_ids"], arrays["position_ids"]
        last, total, logits = arrays["seqlens_k"], arrays["total_sequence_length"], arrays["logits"]
        for position in range(length, length + new_tokens - 1):
            ids[0, 0], positions[0, 0], last[0], total[()] = token, position, position, position + 1
            self.session.run_with_iobinding(binding)
            token = int(logits[0, 0].argmax())


def bare(folder: Path, tokens: int) -> Callable[[], object]:
    """The bare loop."""
    loop = BareLoop(folder)
    return lambda: loop.run(PROMPT, tokens)


def engine(folder: Path, tokens: int) -> Callable[[], object]:
    """The steps of the engine, without text."""
    from benchmarks.engine_steps import generate
    from partita.providers.resolve import parse_chain
    from partita.runtime.generate.choice.sampling import greedy
    from partita.runtime.generate.runner import load_runner

    runner = load_runner(folder, parse_chain("cpu"), threads=1)
    rows = runner.contract.batch_size
    return lambda: [*generate(runner, [PROMPT] * rows, max_new_tokens=tokens, sampler=greedy)]


def library(folder: Path, tokens: int, process: Literal["this", "child"] = "this") -> Callable[[], object]:
    """`partita.load(...).generate(...)`, with text."""
    import partita

    model = partita.load(folder, "cpu", threads=1, process=process, observe=False)
    text = "The list has no more elements, and "
    return lambda: [*model.generate(text, max_new_tokens=tokens, stop_token_ids=())]


def worker_added(folder: Path, tokens: int, rounds: int) -> list[float]:
    """Microseconds of wall time per token that the worker process adds, for each pair of generations."""
    ways = [library(folder, tokens, process) for process in ("this", "child")]
    added = []
    for round_number in range(rounds + 2):
        seconds = []
        for generate in ways:
            began = time.perf_counter()
            generate()
            seconds.append(time.perf_counter() - began)
        if round_number >= 2:
            added.append(1e6 * (seconds[1] - seconds[0]) / tokens)
    return added


WAYS: dict[str, Callable[[Path, int], Callable[[], object]]] = {"bare loop": bare, "engine": engine, "library": library}


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
        with calls() as made:
            generate()
        found.sort()
        median, low = statistics.median(found) / 1000, found[len(found) // 10] / 1000
        print(f"{name:10} {median:7.1f} us median, {low:7.1f} us p10, {statistics.median(made):3.0f} Python calls")
    added = worker_added(given.package, given.tokens, 4 * given.rounds)
    print(f"a worker adds {statistics.median(added):.1f} us per token (wall time, median of {len(added)} pairs)")


if __name__ == "__main__":
    main()
