"""Whose fault it is that no session opens, and what is known of a provider that ONNX Runtime left out."""

from __future__ import annotations

import pytest

from partita.providers.resolve import Resolution, known_providers
from partita.runtime import settling
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.settling import settle_one, to_blame

TENSORRT, CUDA, CPU = CHAIN = tuple(
    Resolution(known_providers()[name], "active") for name in ("tensorrt", "cuda", "cpu")
)
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


@pytest.mark.parametrize(("starting", "blamed"), [("tensorrt", CUDA), ("cuda", TENSORRT), ("both", TENSORRT)])
def test_what_a_library_of_several_providers_says_blames_the_one_that_does_not_start(
    starting: str, blamed: Resolution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "starts", lambda resolution: starting in (resolution.provider.name, "both"))
    assert to_blame(CHAIN, failed(NO_DEVICE)) is blamed


def test_a_provider_that_is_named_or_alone_is_to_blame_and_none_is_started_to_find_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "starts", lambda resolution: pytest.fail("started"))
    assert to_blame(CHAIN, failed(f"CUDAExecutionProvider: {NO_DEVICE}")) is CUDA
    assert to_blame((CUDA, CPU), failed(NO_DEVICE)) is CUDA
    assert to_blame((CPU,), failed(NO_DEVICE)) is None


def test_a_provider_does_not_lack_what_another_one_lacks() -> None:
    log = (missing("cuda", "libcublasLt.so.13"), missing("tensorrt", "libnvinfer.so.10"))
    tensorrt, cuda, cpu = (settle_one(entry, ("CPUExecutionProvider",), log, CHAIN) for entry in CHAIN)
    assert (tensorrt.reason, cuda.reason, cpu.status) == ("library_missing", "library_missing", "active")
    assert (tensorrt.evidence or "").startswith("libnvinfer.so.10: ")
    assert (cuda.evidence or "").startswith("libcublasLt.so.13: ")
    silent = settle_one(TENSORRT, ("CPUExecutionProvider",), log[:1], CHAIN)
    assert (silent.reason, silent.evidence) == (
        "initialisation_failed",
        "ONNX Runtime did not start it and gave no reason",
    )
