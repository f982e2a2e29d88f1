"""What the NVIDIA driver says, read through a module that answers as pynvml does: no GPU is at hand."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from partita.machine.records import Gpu
from partita.runtime.machine import nvidia_gpus


@pytest.fixture
def nvml(monkeypatch):
    """A driver with two GPUs."""
    module: Any = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: b"580.95.05"
    module.nvmlSystemGetCudaDriverVersion = lambda: 13010
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: ("NVIDIA H100", b"NVIDIA L4")[handle]
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=(handle + 1) << 30)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_every_gpu_is_described_where_the_driver_answers(nvml, monkeypatch):
    assert nvidia_gpus() == (
        Gpu(name="NVIDIA H100", memory_bytes=1 << 30, driver="580.95.05", cuda_driver="13.1"),
        Gpu(name="NVIDIA L4", memory_bytes=2 << 30, driver="580.95.05", cuda_driver="13.1"),
    )

    def fail():
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlDeviceGetCount = fail
    assert nvidia_gpus() is None
    nvml.nvmlInit = fail
    assert nvidia_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_gpus() is None, "the package is not installed"
