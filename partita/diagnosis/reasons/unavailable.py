"""Reasons for which a provider does not start; they apply to every node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partita.diagnosis.evidence import Context, Finding
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_OPTIONS, ASK_PROVIDER, Step
from partita.observations.codes import ReasonCode
from partita.observations.records import ChainEntry


def _reason(code: ReasonCode, example: tuple[str, str, str], step: Step = ASK_PROVIDER, **fields: Any) -> Reason:
    """A reason of providers. `example`: an unavailable provider, the evidence and the remedy."""
    provider, evidence, remedy = example
    entry = ChainEntry(provider=provider, status="unavailable", reason=code, evidence=evidence, remedy=remedy)
    node = Context(node="model.layers.0.mlp.up_proj/MatMul", op_type="MatMul", skipped=entry)
    return Reason(code=code, level="provider", example=node, steps=(step,), **fields)


def find_not_in_build(context: Context) -> Iterator[Finding]:
    """The provider is unavailable for this reason; the default evidence is its absence from the list."""
    entry = context.skipped
    if not context.started and entry.reason == "not_in_build":
        evidence = entry.evidence or f"{entry.provider} is not among the providers of this build"
        yield Finding("derived", "entry", evidence, entry.remedy)


REASONS = (
    _reason(
        "not_in_build",
        (
            "WebGpuExecutionProvider",
            "onnxruntime 1.31.1 offers CPUExecutionProvider",
            "pip install onnxruntime-webgpu in an environment without another ONNX Runtime",
        ),
        title="Provider not in this build of ONNX Runtime",
        condition="the installed ONNX Runtime was built without the provider",
        needs="the list of providers of the installed ONNX Runtime",
        remedy="install the ONNX Runtime wheel that contains the provider",
        find=find_not_in_build,
        found_on=("entry",),
    ),
    _reason(
        "library_missing",
        (
            "CUDAExecutionProvider",
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
            'pip install "onnxruntime-gpu[cuda,cudnn]"',
        ),
        title="Library missing",
        condition="the provider is in the build, but the loader does not find a shared library that it needs",
        needs="the loader's message",
        remedy="install the library that the evidence names, in a folder that the loader searches",
    ),
    _reason(
        "version_mismatch",
        (
            "CUDAExecutionProvider",
            "CUDA driver version is insufficient for CUDA runtime version",
            "update the NVIDIA driver",
        ),
        title="Incompatible versions",
        condition="a library, plugin or driver is installed in a version that is incompatible with the others",
        needs="the error message",
        remedy="install compatible versions; the evidence names the incompatible component",
    ),
    _reason(
        "duplicate_runtime",
        (
            "CUDAExecutionProvider",
            "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are installed side by side",
            "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
        ),
        title="Several ONNX Runtimes in one environment",
        condition="more than one ONNX Runtime wheel is installed; they share one folder and overwrite each "
        "other's files",
        needs="the list of installed wheels",
        remedy="uninstall every ONNX Runtime wheel, then install one of them again",
        entry_kind="derived",
    ),
    _reason(
        "device_missing",
        (
            "WebGpuExecutionProvider",
            "Failed to get a WebGPU adapter: No supported adapters.",
            "install a Vulkan driver for the GPU and the loader",
        ),
        title="No device found",
        condition="the provider's libraries load, but the machine has no device for it, or the driver reports none",
        needs="the provider's status and error message",
        remedy="use a machine with a device for this provider, or install the driver of the device",
    ),
    _reason(
        "option_rejected",
        (
            "CUDAExecutionProvider",
            "Invalid device ID: 7, must be between 0 and 0 (inclusive)",
            "see `partita providers --json` for its options",
        ),
        ASK_OPTIONS,
        title="Option rejected",
        condition="the provider rejects the value of one of its options on this machine",
        needs="the provider's error message",
        remedy="change or remove the option that the evidence names",
    ),
    _reason(
        "initialisation_failed",
        (
            "CUDAExecutionProvider",
            "the process was killed by SIGABRT while opening a session; its last output: terminate called "
            "without an active exception",
            "see the evidence; nvidia-smi shows whether GPU and driver answer",
        ),
        title="Initialisation failed",
        condition="the provider failed, crashed or hung at its start, and its message matches no other reason",
        needs="the signal, or the first line of the error",
        remedy="read the evidence; `partita providers` tests the provider in a separate process",
    ),
)
