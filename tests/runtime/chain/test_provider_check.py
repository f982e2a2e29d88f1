"""Provider check in a child process, and providers that ONNX Runtime leaves out: cause, evidence and remedy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.providers.options import parse_libraries
from partita.providers.resolve import Resolution, all_names, failure, known_providers, parse_chain, resolve
from partita.remedies import Remedy
from partita.runtime.chain import provider_check, provider_state
from partita.runtime.chain.provider_check import (
    Check,
    WorkerResult,
    best_chain,
    candidates,
    check,
    examine,
    judge,
)
from partita.runtime.chain.provider_state import (
    register_plugins,
    settle_one,
    to_blame,
    unavailable,
)
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.ort.session_options import Opening
from tests.commands.test_signals import NAMES_ENTRY, library
from tests.conftest import require

CRASH = (
    "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void boom(void)"
    '{ fputs("assertion \\x1b[31mfailed\\x07: device != null\\n", stderr); abort(); }'
)


def try_library(path: Path, *, timeout_seconds: float = 30.0) -> Check:
    """What becomes of a plugin library."""
    (provider,) = parse_libraries({"mine": path}, all_names())
    (found,) = check(resolve((provider,), ()), timeout_seconds=timeout_seconds)
    return found


def no_nvidia_driver() -> bool:
    return not Path("/proc/driver/nvidia").exists() and shutil.which("nvidia-smi") is None


def test_cpu_provider_is_usable_and_has_device():
    (found,) = check(resolve(parse_chain("cpu"), available_ort_names()))
    assert found.usable
    assert (found.library_loads, found.device_found, found.resolution.reason) == (True, True, None)
    assert found.seconds is not None


def test_missing_provider_library_is_named_in_evidence():
    provider, library = known_providers()["cuda"], "libcublasLt.so.13"
    require("onnxruntime-gpu", provider.ort_name in available_ort_names())
    require("a machine without an NVIDIA driver", no_nvidia_driver())
    (found,) = check(resolve((provider,), available_ort_names()))
    assert not found.usable
    assert found.resolution.reason == "library_missing"
    assert found.resolution.evidence == f"{library}: cannot open shared object file: No such file or directory"
    assert "onnxruntime-gpu[cuda,cudnn]" in str(found.resolution.remedy)
    assert (found.library_loads, found.device_found) == (False, None)


def test_crashing_library_is_reported_as_initialisation_failed(tmp_path):
    found = try_library(library(tmp_path, CRASH)).resolution
    assert found.reason == "initialisation_failed" and found.remedy
    for text in ("killed by SIGABRT while loading the provider's library", "assertion failed?: device != null"):
        assert text in (found.evidence or "")
    assert (found.evidence or "").isprintable()


def test_loader_error_explains_unloadable_plugin_library(tmp_path):
    needed = library(tmp_path, "int needed(void) { return 0; }")
    needed = needed.rename(tmp_path / "libneeded_by_it.so")
    (tmp_path / "user.c").write_text("int needed(void); int user(void) { return needed(); }\n" + NAMES_ENTRY)
    command = ["cc", "-shared", "-fPIC", "-o", "libuser.so", "user.c", "-L.", "-lneeded_by_it"]
    subprocess.run(command, cwd=tmp_path, check=True)
    needed.unlink()
    none = try_library(library(tmp_path, "int nothing(void) { return 0; }"))
    assert none.resolution.reason == "version_mismatch" and none.library_loads is False
    assert "undefined symbol: CreateEpFactories" in (none.resolution.evidence or "")
    found = try_library(tmp_path / "libuser.so")
    assert found.resolution.reason == "library_missing"
    assert (found.resolution.evidence or "").startswith("libneeded_by_it.so: cannot open shared object file")


def hanging(folder: Path) -> Path:
    """A library that writes its process id to a file and does not return."""
    source = (
        "#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void wait_(void) { FILE *f = "
    )
    return library(
        folder, f'{source}fopen("{folder}/pid", "w"); fprintf(f, "%d", getpid()); fclose(f); for (;;) pause(); }}'
    )


def test_hanging_library_times_out_and_is_killed(tmp_path):
    found = try_library(hanging(tmp_path), timeout_seconds=8.0)
    assert found.resolution.reason == "initialisation_failed"
    assert "no answer within 8 s while loading the provider's library" in (found.resolution.evidence or "")
    assert_gone(int((tmp_path / "pid").read_text()))


def test_interrupt_kills_child_processes(tmp_path, monkeypatch):
    def wait(*_):
        while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("partita.runtime.chain.provider_check.Worker.wait", wait)
    with pytest.raises(KeyboardInterrupt):
        try_library(hanging(tmp_path))
    monkeypatch.undo()
    assert_gone(int((tmp_path / "pid").read_text()))


def assert_gone(pid: int) -> None:
    """The process ends within a second; what is left of it may wait for its parent to notice."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} is still there")


def test_wrong_result_missing_device_and_fallback_are_unavailable():
    resolution = Resolution(known_providers()["webgpu"], "active")
    wrong = outcome(result={"error": None, "correct": False, "output": [[0.0, 0.0], [0.0, 0.0]]})
    assert "it computed [[0.0, 0.0], [0.0, 0.0]], which is incorrect" in (
        judge(resolution, wrong).resolution.evidence or ""
    )
    strict = "graph nodes that are assigned to the default CPU EP, but fallback to CPU EP has been explicitly disabled"
    plugin = Resolution(known_providers()["webgpu"], "active", library=Path("/x/libep.so"))
    found = judge(plugin, outcome(result={"error": None, "offered": [], "loaded": True, "devices": []}))
    assert (found.resolution.reason, found.library_loads, found.device_found) == ("device_missing", True, False)
    left = judge(resolution, outcome(result={"error": {"type": "Fail", "text": strict}}))
    assert left.resolution.reason == "initialisation_failed"
    assert "did not run a float32 MatMul" in (left.resolution.evidence or "")


def outcome(*, result: dict) -> WorkerResult:
    return WorkerResult(result=result, stage="run", log=(), how="", seconds=0.1)


def test_no_child_process_is_started_with_cpu_only(monkeypatch):
    monkeypatch.setattr(provider_check, "Worker", None)
    monkeypatch.setattr(provider_check, "installed_version", lambda wheel: None)
    found = best_chain(("CPUExecutionProvider",))
    assert [entry.name for entry in found.chain] == ["cpu"]
    assert found.reason == "cuda, directml, openvino and webgpu: not in this build; so cpu"


def test_best_chain_is_best_usable_provider_then_cpu():
    names = ("CUDAExecutionProvider", "OpenVINOExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider")
    cuda, openvino = (entry for entry in candidates(names) if entry.provider.name in ("cuda", "openvino"))
    failed = Check(Resolution(cuda.provider, "unavailable", "device_missing", "none", Remedy("buy one")), True, False)
    found = best_chain(names, (failed, Check(openvino, True, True)))
    assert [entry.name for entry in found.chain] == ["openvino", "cpu"]
    assert found.reason == "cuda could not start (device_missing); openvino is usable; so openvino, then cpu"
    assert [entry.provider.name for entry in found.skipped] == ["cuda"]


def test_cpu_emulated_device_is_usable_but_not_chosen():
    resolution = Resolution(known_providers()["webgpu"], "active")
    ran: dict[str, object] = {"error": None, "correct": True, "devices": []}
    disguised = judge(resolution, outcome(result={**ran, "hardware": ["CPU"]}))
    assert (disguised.usable, disguised.software) == (True, True)
    found = best_chain(("WebGpuExecutionProvider", "CPUExecutionProvider"), (disguised,))
    assert [entry.name for entry in found.chain] == ["cpu"] and found.skipped == (), "it could start"
    assert "webgpu is usable, but only on the CPU: there is no GPU" in found.reason
    for hardware in (["CPU", "GPU"], []):
        real = judge(resolution, outcome(result={**ran, "hardware": hardware}))
        assert (real.usable, real.software) == (True, False)


def over_stubs(tmp_path_factory, options):
    """Outcome of a child that runs the CUDA provider over stub libraries."""
    require("onnxruntime-gpu", "CUDAExecutionProvider" in available_ort_names())
    require("a C compiler", shutil.which("cc") is not None)
    require("elftools")
    from partita.providers.cuda_dry_run.devices import device
    from partita.providers.cuda_dry_run.stub_build import child_environment, prepare, provider_library

    cache = tmp_path_factory.getbasetemp() / "probe-stand-ins"
    environment = child_environment(prepare(provider_library(), cache=cache), device(), dict(os.environ))
    # CUDA libraries that are installed as Python packages would be loaded in place of the stubs.
    bare = Resolution(replace(known_providers()["cuda"], preload=False), "active", options=options)
    (seen,) = examine([bare], environment=environment)
    return seen


def test_option_value_that_cuda_rejects_is_the_reason(tmp_path_factory):
    """A GPU number that the machine does not have."""
    seen = over_stubs(tmp_path_factory, {"device_id": "5"})
    found = judge(Resolution(known_providers()["cuda"], "active"), seen).resolution
    assert found.reason == "option_rejected"
    assert (found.evidence or "").startswith("Invalid device ID: 5, must be between 0")


def test_provider_computing_zeros_is_not_usable(tmp_path_factory):
    """It starts, runs, and returns zeros."""
    cuda = known_providers()["cuda"]
    every = {option.name: option.default for option in cuda.options if not option.session_key}
    seen = over_stubs(tmp_path_factory, every)
    assert seen.result is not None, seen
    assert seen.result["error"] is None, "an option of providers/cuda.py is not accepted"
    reported = seen.result["options"]
    assert {name: reported[name] for name in every if name in reported} == {n: every[n] for n in every if n in reported}
    assert set(every) - set(reported) == {"enable_skip_layer_norm_strict_mode"}
    found = judge(Resolution(cuda, "active"), seen)
    assert not found.usable
    assert found.resolution.evidence == "it computed [[0.0, 0.0], [0.0, 0.0]], which is incorrect"


# Providers that ONNX Runtime leaves out: the provider at fault, the cause and the remedy


TENSORRT, CUDA, CPU = CHAIN = tuple(
    Resolution(known_providers()[name], "active") for name in ("tensorrt", "cuda", "cpu")
)
OPENVINO = known_providers()["openvino"]
NO_DEVICE = "CUDA failure 100: no CUDA-capable device is detected ; GPU=-1 ; hostname=x"


def failed(text: str) -> NativeFailureError:
    return NativeFailureError(RuntimeError(text), ())


def missing(provider: str, library: str) -> str:
    """The line in which ONNX Runtime says why it cannot load the library of a provider."""
    return (
        "[E:onnxruntime:Default, provider_bridge_ort.cc:2251 Get] [ONNXRuntimeError] : 1 : FAIL : Failed to load "
        f"library /x/libonnxruntime_providers_{provider}.so with error: {library}: cannot open shared object file: "
        "No such file or directory"
    )


def test_named_provider_is_blamed_else_the_one_without_which_the_model_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    path, working = Path("/models/tensorrt/cuda/model.onnx"), {"tensorrt", "cuda", "cpu"}
    monkeypatch.setattr(
        provider_state, "opens_on", lambda path, active, _: {entry.provider.name for entry in active} <= working
    )

    def blamed(text: str, chain: Sequence[Resolution] = CHAIN) -> Resolution | None:
        return to_blame(path, chain, failed(text), Opening())

    assert blamed(NO_DEVICE) is CUDA
    assert blamed("TensorrtExecutionProvider: out of memory") is TENSORRT
    assert blamed("bad allocation") is TENSORRT, "the first, if the model opens without any"
    working.remove("cuda")
    assert blamed("bad allocation") is CUDA
    assert blamed(f"Load model from {path} failed: bad allocation") is CUDA, "the folder names both"
    assert blamed("tensorrt_rtx: no device") is CUDA, "another provider's name"
    assert blamed(NO_DEVICE, (CPU,)) is None


def opened(log: tuple[str, ...]) -> Any:
    """A session with this log on the CPU provider only."""
    return SimpleNamespace(registered=("CPUExecutionProvider",), log=log, assigned=tuple)


def test_missing_library_is_attributed_to_its_provider() -> None:
    log = (missing("cuda", "libcublasLt.so.13"), missing("tensorrt", "libnvinfer.so.10"))
    tensorrt, cuda, cpu = (settle_one(entry, opened(log), CHAIN) for entry in CHAIN)
    assert (tensorrt.reason, cuda.reason, cpu.status) == ("library_missing", "library_missing", "active")
    assert (tensorrt.evidence or "").startswith("libnvinfer.so.10: ")
    assert (cuda.evidence or "").startswith("libcublasLt.so.13: ")
    silent = settle_one(TENSORRT, opened(log[:1]), CHAIN)
    assert (silent.reason, silent.evidence) == (
        "initialisation_failed",
        "ONNX Runtime did not start it and gave no reason",
    )


@pytest.mark.parametrize(
    ("options", "sets_it"), [({}, False), ({"device_type": "CPU"}, False), ({"device_type": "GPU"}, True)]
)
def test_remedy_omits_option_value_already_set(options: Mapping[str, str], sets_it: bool) -> None:
    """device_type defaults to CPU."""
    for reason in ("device_missing", "initialisation_failed"):
        why = failure(OPENVINO, reason, "no message")
        remedy = unavailable(Resolution(OPENVINO, "active", options=options), why).remedy
        assert remedy is not None and (remedy.options[1:] == ("openvino.device_type=CPU",)) is sets_it
        assert "plugin" not in str(remedy), "which the wheel is not"


def test_plugin_without_device_suggests_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin ignores device_type."""
    monkeypatch.setattr(provider_state, "register_library", lambda name, path: ())
    (found,) = register_plugins([Resolution(OPENVINO, "active", library=Path("libopenvino_plugin.so"))])
    assert found.reason == "device_missing" and found.remedy is not None and not found.remedy.options
    assert found.remedy.command == ("pip", "install", "onnxruntime-openvino")


# What is known of a session that was opened and is not run: what a refusal speaks of
