"""Sessions on the real ONNX Runtime: temporary files, reports, errors and optimised graphs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import external_data_helper, numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

import partita
from partita.errors import GenerationError, PackageError, ProviderError, ResourceError, UsageError
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain.open_chain import open_session
from partita.runtime.generate import run_facts
from partita.runtime.generate.run_facts import add_optimised, with_optimised
from partita.runtime.ort import binding as bindings
from partita.runtime.ort import errors as ort_errors
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import NATIVE_ERRORS, host_buffer
from partita.runtime.ort.native_log import captured_output
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session import NativeFailureError, open_native
from partita.runtime.ort.session_options import Opening
from partita.runtime.place import run_phases as place
from partita.runtime.place.tensor_types import sizes_of, tensor_types
from tests.memory import native_bytes
from tests.runtime.place.test_run_phases import written

CPU = resolve(parse_chain("cpu"), available_ort_names())


def ours_in(folder: Path) -> list[Path]:
    """What Partita left in a temporary folder; torch leaves its own there."""
    return [path for path in folder.iterdir() if path.name.startswith("partita")]


def write_model(path: Path, node: str, dtype: str = "float") -> Path:
    ports = f"({dtype}[1] x) => ({dtype}[1] y)"
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {ports} {{ [only] y = {node} }}'), path)
    return path


def test_session_removes_its_temporary_files(tiny_package, tmp_path, own_temp):
    opened = open_session(tiny_package() / "model.onnx", CPU, threads=1, observe=True)
    assert opened._native.get_session_options().intra_op_num_threads == 1
    assert any("Session successfully initialized" in line for line in opened.log)
    assert all(re.match(r"\[[VIWEF]:onnxruntime:", line) for line in opened.log), "without stamps and colours"
    assert ours_in(own_temp), "the profile is being written somewhere else"
    assert json.loads(opened.end_profiling() or "")
    assert ours_in(own_temp) == []
    opened.close()
    assert opened.end_profiling() is None
    open_session(tiny_package() / "model.onnx", CPU, threads=1, observe=True).close()
    assert ours_in(own_temp) == [], "closed before its profile is read"
    (tmp_path / "bad.onnx").write_bytes(b"garbage" * 10)
    with pytest.raises(PackageError, match=r"bad\.onnx: ONNX Runtime cannot load it: .*check it with onnx\.checker"):
        open_session(tmp_path / "bad.onnx", CPU, threads=1, observe=True)
    assert ours_in(own_temp) == []


def test_failed_run_error_is_single_line_without_stderr_output(open_runner, capfd):
    runner = open_runner()
    feed = runner.bound("decode", 1, 1)
    feed.place(np.zeros(1, np.int64), 1)
    feed.tokens.fill(10_000)
    with pytest.raises(GenerationError, match=r"model\.onnx: a run failed: .*out of data bounds") as caught:
        feed.run()
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_failed_provider_run_is_not_repeated_on_cpu(tmp_path):
    """ONNX Runtime's Python class catches EPFail, changes to the CPU provider and runs again."""
    opened = open_session(write_model(tmp_path / "m.onnx", "Relu(x)"), CPU, threads=1, observe=False)
    runs = []

    def fail(*_: object, **__: object) -> None:
        runs.append(1)
        raise EPFail("the device was lost")

    binding = opened.binding()
    binding.bind_input("x", host_buffer((1,), "float32"))
    binding.bind_output("y", host_buffer((1,), "float32"))
    native = SimpleNamespace(run_with_iobinding=fail, is_webgpu_graph_capture_enabled=lambda: False)
    binding._io._session = opened._native._sess = native
    with pytest.raises(ProviderError, match="the device was lost"):
        binding.run()
    assert runs == [1]


def test_all_onnxruntime_exceptions_are_translated():
    native = onnxruntime.capi.onnxruntime_pybind11_state
    classes = {v for v in vars(native).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert len(classes) >= 15
    assert classes <= set(NATIVE_ERRORS)
    known = ort_errors.DAMAGED | ort_errors.PROVIDER_TROUBLE | {ort_errors.NO_KERNEL}
    assert known <= {c.__name__ for c in classes}


def test_lack_of_memory_is_a_resource_error_with_remedy():
    with pytest.raises(ResourceError, match=r"buffer of 4,611,686,018,427,387,904 bytes in Cpu memory"):
        host_buffer((1 << 60,), "float32")
    error = ort_errors.open_error(Path("m"), ["X"], RuntimeError("std::bad_alloc"), ())
    assert isinstance(error, ResourceError) and "--precision fp16" in str(error)
    for text in ("std::bad_alloc", "BFCArena: Failed to allocate memory for requested buffer of size 1"):
        error = ort_errors.run_error("model.onnx", RuntimeError(text))
        assert isinstance(error, ResourceError) and "--max-length 512" in str(error)


def test_stderr_is_restored_after_exception(capfd):
    with pytest.raises(UsageError), captured_output() as captured:
        os.write(2, b"\x1b[1;31m2026-11-21 08:10:19.367891333 [E:onnxruntime:, a.cc:1 F] lost?\x1b[m\n\n")
        raise UsageError("on purpose")
    assert captured.lines == ("[E:onnxruntime:, a.cc:1 F] lost?",)
    os.write(2, b"back\n")
    assert capfd.readouterr().err == "back\n"


# A session that was profiled once costs no memory from run to run, though ONNX Runtime goes on taking notes in it


WIDE, LOOPS, EVERY = 320, 16, 64
NOTES = 8 * LOOPS
"""Bytes that a run of `write_loops` leaves behind."""


def write_loops(path: Path) -> Path:
    """A product after the other, each of which the thread pool shares out."""
    names = ["x", *(f"y{index}" for index in range(LOOPS))]
    nodes = "".join(f"{other} = MatMul({one}, w)\n" for one, other in pairwise(names))
    ports = f"(float[1,{WIDE}] x) => (float[1,{WIDE}] {names[-1]})"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> loops {ports} {{ {nodes} }}')
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((WIDE, WIDE), np.float32), "w"))
    onnx.save(model, path)
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


def grown(binding: Binding) -> int:
    """Bytes that runs leave behind, after some of them."""
    sizes = []
    for _ in range(8):
        for _ in range(2 * EVERY):
            binding.run()
        sizes.append(native_bytes())
    return sizes[-1] - sizes[1]


def apart(what: Callable[[], Any]) -> Any:
    """In a thread of its own, which has no notes yet and in which no run has failed."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(what).result()


def test_memory_does_not_grow_in_runs_after_profiling(bound, monkeypatch):
    monkeypatch.setattr(bindings, "NOTED_RUNS", EVERY)
    assert apart(lambda: grown(bound(True))) < 6 * 2 * EVERY * NOTES / 2  # malloc grows by itself, too


def test_notes_are_not_removed_in_thread_with_failed_run(bound, monkeypatch):
    """Removing the note of a loop that began and did not end terminates the process."""
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


# Messages of failures


class InvalidGraph(Exception):  # noqa: N818 - as ONNX Runtime calls it
    """As ONNX Runtime 1.24 raises it."""


SCHEMA = (
    "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. In Node, ... Error Node(attention) with "
    "schema(com.microsoft::GroupQueryAttention:1) has input size 14 not in range [min=7, max=12]."
)
PIPELINE = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running GroupQueryAttention node. Status "
    'Message: Failed to create a WebGPU compute pipeline: [Invalid ShaderModule "Split"] is invalid'
)


def test_unknown_operator_version_error_suggests_matching_onnxruntime(tmp_path: Path) -> None:
    """Exporting again with the same versions would give the same file."""
    error = ort_errors.open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], InvalidGraph(SCHEMA), ())
    assert isinstance(error, PackageError) and "run it with the ONNX Runtime it was exported for" in str(error)
    invalid = InvalidGraph("This is an invalid model.")
    other = ort_errors.open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], invalid, ())
    assert "onnx.checker" in str(other)


def test_shader_compilation_failure_is_a_provider_error() -> None:
    error = ort_errors.run_error("model.onnx", RuntimeError(PIPELINE))
    assert isinstance(error, ProviderError) and "use another provider" in str(error)


@pytest.mark.parametrize("location", [".\\d.data", "weights\\d.data"])
def test_windows_path_of_external_data_is_reported_with_correction(tmp_path: Path, location: str) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PackageError) as caught:
        partita.place(tmp_path / "model.onnx", "cpu")
    wanted = PureWindowsPath(location).as_posix()
    assert f"the path {location!r} is a Windows path; write {wanted!r} instead" in str(caught.value)
    model.graph.initializer[0].external_data[0].value = wanted
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / wanted).parent.mkdir(exist_ok=True)
    (tmp_path / wanted).write_bytes(np.ones(4, np.float32).tobytes())
    assert partita.place(tmp_path / "model.onnx", "cpu").chain[0].provider == "CPUExecutionProvider"


# The optimised graph, which the first session writes without weights


NORM = """g (float[2,4,4] x, float[2,4,4] y) => (float[2,4,4] z)
<float[4] g = {1,1,1,1}, float[4] b = {1,1,1,1}, float two = {2}> {
  [add] s = Add(x, y) [ln] l = LayerNormalization(s, g, b) [pow] z = Pow(l, two)
}"""
"""ONNX Runtime fuses the first two into one node that it names SkipLayerNormalization."""
LARGE = """g (float[1,2048] x) => (float[1,2048] y) <int64[2] s = {2048, 2048}> {
  w = ConstantOfShape<value = float[1] {0.5}>(s) y = MatMul(x, w)
}"""


def test_unnamed_fused_node_is_mapped_to_replaced_nodes(tmp_path):
    report = partita.place(written(tmp_path / "m.onnx", NORM), "cpu")
    replaced = {node.name: (node.op_type, node.replaces) for node in report.phases[0].nodes}
    rows = {row.name: (row.op_type, row.ran_as, row.state) for row in report.phases[0].file_nodes}
    assert rows["ln"] == ("LayerNormalization", ("SkipLayerNormalization",), "executed")
    assert replaced == {"SkipLayerNormalization": ("SkipLayerNormalization", ("add", "ln")), "pow": ("Pow", ())}
    assert [check for check in report.checks if not check.passed] == [] and report.conflicts == ()


def test_package_has_optimised_graph_for_each_session(open_runner):
    runner = open_runner(observe=True, static_shapes=True)
    assert place.run_package(runner, 1) is None
    facts = with_optimised(run_facts.run_facts(runner), [entry.session for entry in runner.graphs])
    assert len(facts.sessions) == 2
    for session in facts.sessions:
        planned = {name for stream in session.plan or () for name in stream}
        assert {node.name for node in session.optimised or ()} == planned and planned


def test_graph_is_written_while_the_session_opens_and_without_weights(tmp_path):
    """The reason is the same for weights of every size: they are discarded."""
    path = written(tmp_path / "m.onnx", LARGE)
    with closing(open_native(path, CPU, Opening(observe=True))) as session:
        assert session.optimised is not None and len(session.optimised) < 4096
        (product,) = onnx.load_from_string(session.optimised).graph.node
        assert product.op_type == "MatMul", "16 MiB of folded weights are not in the file"
    with closing(open_native(path, CPU, Opening())) as session:
        assert session.optimised is None


def test_missing_optimised_graph_has_a_reason(open_runner, monkeypatch):
    runner = open_runner(observe=True)
    facts, session = run_facts.run_facts(runner), runner.graphs[0].session
    assert place.with_graphs(facts, [session], ResourceError("memory ran out")) is facts
    (seen,) = facts.sessions
    session.optimised = b"no graph"
    assert "not a valid ONNX file" in add_optimised(seen, session, 0).optimised_missing_reason
    (entry,) = session.active
    compiling = replace(entry.provider, compiles=True)
    session.active, session.optimised = (replace(entry, provider=compiling),), None
    assert "cpu compiles" in add_optimised(seen, session, 0).optimised_missing_reason
    session.active = (replace(entry, provider=replace(compiling, ort_name="Idle")), entry)
    assert "of 1,024 TiB" in add_optimised(seen, session, 1 << 50).optimised_missing_reason

    def fails(*_):
        raise NativeFailureError(RuntimeError("no room\nat all"), ())

    monkeypatch.setattr(run_facts, "open_native", fails)
    assert "no room at all" in add_optimised(seen, session, 0).optimised_missing_reason


def test_invalid_split_count_does_not_crash_type_inference() -> None:
    text = '<ir_version: 9, opset_import: ["" : 20]>\ng (int64[4] x) => (a, b, c, d) {\n  {node}\n}'
    split = "[planted] a, b, c, d = Split<num_outputs={count}>(x)"
    legal, illegal = (parser.parse_model(text.replace("{node}", split.replace("{count}", count))) for count in "43")
    assert sizes_of(tensor_types(legal)["a"]) == (1,)
    assert "a" not in tensor_types(illegal)
