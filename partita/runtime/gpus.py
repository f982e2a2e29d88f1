"""NVIDIA GPUs as their driver describes them, through nvidia-ml-py where that package is installed."""

from __future__ import annotations

import importlib
from typing import Any

from partita.machine.records import Gpu


def nvidia_gpus() -> tuple[Gpu, ...] | None:
    """Every GPU of this machine; None when nvidia-ml-py is not installed or no driver answers it."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except nvml.NVMLError:
        return None
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = _cuda_version(nvml.nvmlSystemGetCudaDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=_text(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                driver=driver,
                cuda_driver=cuda,
            )
            for handle in handles
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """Older versions of the package give bytes."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _cuda_version(number: int) -> str:
    """`13.0` for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"
