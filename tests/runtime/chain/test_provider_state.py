"""Providers that ONNX Runtime leaves out: the provider at fault, the cause and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.providers.resolve import Resolution, failure, known_providers
from partita.runtime.chain import provider_state
from partita.runtime.chain.provider_state import (
    register_plugins,
    settle_one,
    to_blame,
    unavailable,
)
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.ort.session_options import Opening

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
