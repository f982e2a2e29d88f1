"""Sessions on the real ONNX Runtime: temporary files, reports and errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

from partita.errors import GenerationError, PackageError, ProviderError, ResourceError, UsageError
from partita.providers.base import Provider
from partita.providers.resolve import Resolution, parse_chain, resolve
from partita.runtime.chain.open_chain import open_session
from partita.runtime.ort import binding as bindings
from partita.runtime.ort import errors as ort_errors
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import NATIVE_ERRORS, host_buffer
from partita.runtime.ort.native_log import captured_output
from partita.runtime.ort.registry import available_ort_names
from tests.memory import native_bytes

CPU = resolve(parse_chain("cpu"), available_ort_names())
CUDA = Provider(
    name="cuda",
    ort_name="CUDAExecutionProvider",
    aliases=(),
    wheels=("onnxruntime-gpu",),
    device_memory="Cuda",
    preferred_attention="gqa",
)
NO_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" not in available_ort_names() or Path("/dev/nvidia0").exists(),
    reason="needs an ONNX Runtime with CUDA on a machine without",
)


def ours_in(folder: Path) -> list[Path]:
    """What Partita left in a temporary folder; torch leaves its own there."""
    return [path for path in folder.iterdir() if path.name.startswith("partita")]


def write_model(path: Path, node: str, dtype: str = "float") -> Path:
    ports = f"({dtype}[1] x) => ({dtype}[1] y)"
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {ports} {{ [only] y = {node} }}'), path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_host_buffer_is_shared_zeroed_and_aligned(dtype):
    buffer = host_buffer((2, 3), dtype)
    assert buffer.address() == buffer.host.ctypes.data and buffer.address() % 64 == 0
    assert not buffer.host.any() and buffer.size_bytes == buffer.host.nbytes
    assert buffer.value.data_type() == f"tensor({dtype.replace('float32', 'float')})"


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


@NO_CUDA
@pytest.mark.parametrize("observe", [False, True])
def test_provider_start_error_quotes_onnxruntime(tiny_package, own_temp, capfd, observe):
    with pytest.raises(ProviderError, match=r"onnx: cuda: library_missing: lib\w+\.so\.\d+: cannot open") as caught:
        open_session(tiny_package() / "model.onnx", (Resolution(CUDA, "active"),), threads=1, observe=observe)
    assert "\n" not in str(caught.value)
    assert ours_in(own_temp) == []
    del caught  # the half-open session goes with the traceback, and would log at that moment
    assert capfd.readouterr().err == ""


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


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_buffered_stdout_text_is_not_captured_in_log(redirection):
    """The text is pending while the descriptors change, and cannot be written then."""
    script = (
        "import os\n"
        "from partita import process\n"
        "from partita.runtime.ort.native_log import captured_output\n"
        "process.open_null_device()\n"
        "process.own_process = True\n"
        "print('pending')\n"
        "with captured_output() as c: os.write(2, b'within\\n')\n"
        "os.write(2, b'after\\n')\n"
        "os._exit(c.lines == ('within',))"
    )
    command = f"exec {shlex.join([sys.executable, '-c', script])} {redirection}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], env=buffered, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "after\n")


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
