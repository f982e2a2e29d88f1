"""The machine and the software a run happens on, for the report."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

from partita.observations.records import Environment, InstalledWheel
from partita.runtime.cpu.cores import cpu_name
from partita.runtime.ort.registry import ort_build
from partita.runtime.wheels import runtime_wheels

PACKAGES = ("numpy", "onnx", "transformers", "tokenizers", "safetensors", "torch", "onnxscript", "onnx-ir")
"""What can have a part in a run or an export; those that are not installed are left out."""
CPU_INFO = Path("/proc/cpuinfo")
INTEGER_UNITS = ("amx_int8", "avx512_vnni", "avx_vnni", "asimddp")
"""Flags of processors with instructions for products of 8-bit integers, the fastest first."""


def environment() -> Environment:
    """Describe this machine and the installed packages."""
    build, wheels = ort_build(), _onnxruntime_wheels()
    return Environment(
        cpu=cpu_name(),
        logical_cores=os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        operating_system=platform.platform(),
        python=platform.python_version(),
        onnxruntime_package=", ".join(f"{wheel.name} {wheel.version}" for wheel in wheels),
        onnxruntime_wheels=wheels,
        onnxruntime_version=build.version,
        onnxruntime_build=build.build,
        packages=_installed(PACKAGES),
    )


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    """Version of each of these packages that is installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _onnxruntime_wheels() -> tuple[InstalledWheel, ...]:
    """The wheel that ONNX Runtime came in; all of them when several overwrote each other."""
    return tuple(InstalledWheel(name=wheel.name, version=wheel.version) for wheel in runtime_wheels())


def cpu_flags(info: Path = CPU_INFO) -> frozenset[str] | None:
    """The words of Linux's description of the processor, its instruction sets among them; None elsewhere."""
    return frozenset(info.read_text(encoding="utf-8", errors="replace").split()) if info.is_file() else None


def integer_unit(info: Path = CPU_INFO) -> str | None:
    """The flag of what multiplies 8-bit integers in the processor; empty when it has none, None when nobody says."""
    known = cpu_flags(info)
    return None if known is None else next((flag for flag in INTEGER_UNITS if flag in known), "")
