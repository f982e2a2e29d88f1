"""A session that was profiled once costs no memory from run to run, though ONNX Runtime goes on taking notes in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita.errors import GenerationError
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain.open_chain import open_session
from partita.runtime.ort import binding as bindings
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import host_buffer
from partita.runtime.ort.registry import available_ort_names
from tests.memory import native_bytes

WIDE, LOOPS, EVERY = 320, 16, 64
NOTES = 8 * LOOPS
"""Bytes that a run of `write_loops` leaves behind."""
CPU = resolve(parse_chain("cpu"), available_ort_names())


def write_loops(path: Path) -> Path:
    """A product after the other, each of which the thread pool shares out."""
    names = ["x", *(f"y{index}" for index in range(LOOPS))]
    nodes = [helper.make_node("MatMul", [one, "w"], [other]) for one, other in zip(names, names[1:], strict=False)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDE]) for name in (names[0], names[-1])]
    weight = numpy_helper.from_array(np.zeros((WIDE, WIDE), np.float32), "w")
    graph = helper.make_graph(nodes, "loops", ports[:1], ports[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.fixture
def bound(tmp_path: Path) -> Callable[[bool], Binding]:
    """A binding of such a session, whose profile has ended if there was one."""

    def factory(observe: bool) -> Binding:
        session = open_session(write_loops(tmp_path / "loops.onnx"), CPU, threads=2, observe=observe)
        binding = session.binding()
        binding.bind_input("x", host_buffer((1, WIDE), "float32"))
        binding.bind_output(f"y{LOOPS - 1}", host_buffer((1, WIDE), "float32"))
        binding.run()
        assert (session.end_profiling() is not None) == observe
        return binding

    return factory


def grown(binding: Binding, rounds: int = 8) -> int:
    """Bytes that runs leave behind, after some of them."""
    sizes = []
    for _ in range(rounds):
        for _ in range(2 * EVERY):
            binding.run()
        sizes.append(native_bytes())
    return sizes[-1] - sizes[1]


def apart(what: Callable[[], Any]) -> Any:
    """In a thread of its own, which has no notes yet and in which no run has failed."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(what).result()


def test_runs_after_a_profile_leave_nothing_behind(bound, monkeypatch):
    runs = 6 * 2 * EVERY
    assert apart(lambda: grown(bound(False))) < runs * NOTES / 4  # malloc grows by itself, too
    monkeypatch.setattr(bindings, "NOTED_RUNS", 10**9)
    assert apart(lambda: grown(bound(True))) > runs * NOTES / 2, "nothing is noted any more: this is not needed"
    monkeypatch.setattr(bindings, "NOTED_RUNS", EVERY)
    assert apart(lambda: grown(bound(True))) < runs * NOTES / 4  # malloc grows by itself, too


def test_each_thread_has_notes_of_its_own(bound, monkeypatch):
    monkeypatch.setattr(bindings, "NOTED_RUNS", EVERY)
    binding = bound(True)
    for _ in range(2):
        assert apart(lambda: grown(binding)) < 6 * 2 * EVERY * NOTES / 6  # malloc grows by itself, too


def test_nothing_is_left_on_disk_and_none_of_it_costs_a_run(bound, monkeypatch, own_temp, tmp_path):
    monkeypatch.setattr(bindings, "NOTED_RUNS", 2)
    binding = bound(True)
    left = set(own_temp.iterdir())
    apart(lambda: [binding.run() for _ in range(4)])
    assert set(own_temp.iterdir()) == left
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    apart(lambda: [binding.run() for _ in range(4)])


def test_a_thread_in_which_a_run_has_failed_keeps_its_notes(bound, monkeypatch):
    """A loop that was not ended is noted as begun, and taking such notes away ends the process."""
    taken = list[int]()
    monkeypatch.setattr(bindings, "NOTED_RUNS", 2)
    monkeypatch.setattr(bindings, "remove_notes", lambda: taken.append(1))

    def runs() -> None:
        binding = bound(True)
        for _ in range(4):
            binding.run()
        assert len(taken) == 2
        binding.stop()
        with pytest.raises(GenerationError):
            binding.run()
        other = bound(True)
        for _ in range(4):
            other.run()

    apart(runs)
    assert len(taken) == 2
