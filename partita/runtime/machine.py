"""This machine's hardware and packages for reports, and the report of `partita providers`.

`describe_machine` imports ONNX Runtime only in worker processes.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import metadata
from typing import Any

import psutil

import partita
from partita import extras
from partita.machine.records import Gpu, MachineReport, OnnxRuntime, OptionEntry, OrtBuild, ProviderEntry
from partita.observations.records import Environment, InstalledWheel, remedy_records
from partita.providers.base import Provider
from partita.providers.options import generic_provider
from partita.providers.resolve import Resolution, all_names, installed_version, known_providers, one_line, resolve
from partita.runtime.chain.provider_check import (
    STAGES,
    TIMEOUT_SECONDS,
    Check,
    WorkerResult,
    best_chain,
    check,
    examine,
)
from partita.runtime.chain.wheels import environment_findings, plugin_wheels, runtime_wheels
from partita.runtime.cpu import cpu_name

NEEDED_CUDNN = re.compile(r"Require cuDNN (?P<cudnn>\d+)")
"""The build does not record its cuDNN version; the CUDA provider logs it when it cannot start."""
PACKAGES = ("numpy", "onnx", "transformers", "tokenizers", "safetensors", "torch", "onnxscript", "onnx-ir")
"""Packages that affect a run or an export."""


def environment() -> Environment:
    """This machine and its installed packages, for a report. Imports ONNX Runtime."""
    from partita.runtime.ort.registry import ort_build

    build, wheels = ort_build(), runtime_wheels()
    versions = {name: [found.version for found in metadata.distributions(name=name)][:1] for name in PACKAGES}
    return Environment(
        cpu=cpu_name(),
        logical_cores=os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        operating_system=platform.platform(),
        python=platform.python_version(),
        onnxruntime_wheels=tuple(InstalledWheel(name=wheel.name, version=wheel.version) for wheel in wheels),
        onnxruntime_version=build.version,
        onnxruntime_build=build.build,
        packages={name: version for name, found in versions.items() for version in found},
    )


def describe_machine(extra: Sequence[Provider] = (), *, timeout_seconds: float = TIMEOUT_SECONDS) -> MachineReport:
    """Check every known provider, every other provider of this ONNX Runtime, and `extra`; takes seconds."""
    began = time.perf_counter()
    (inventory,) = examine([None], timeout_seconds=timeout_seconds)
    found = inventory.result or {}
    available: tuple[str, ...] = found.get("available", ())
    imported: OrtBuild | None = found.get("build")
    error = None if imported else import_error(inventory)
    ours = {provider.ort_name for provider in all_names(extra).values()}
    known = sorted(known_providers().values(), key=lambda entry: (-entry.rank, entry.name))
    named = {provider.name for provider in extra}
    others = (generic_provider(name) for name in available if name not in ours)
    providers = (*(provider for provider in known if provider.name not in named), *extra, *others)
    if imported:
        resolutions = resolve(providers, available)
        checks = check(resolutions, timeout_seconds=timeout_seconds)
        default = best_chain(available, checks)
        chain, reason = tuple(entry.name for entry in default.chain), default.reason
    else:
        evidence, remedy = f"ONNX Runtime cannot be imported: {error}", extras.remedy(extras.RUNTIME)
        absent = (Resolution(provider, "unavailable", "not_in_build", evidence, remedy) for provider in providers)
        checks = tuple(Check(entry, None, None) for entry in absent)
        chain, reason = (), "no usable ONNX Runtime"
    logged = (match["cudnn"] for entry in checks for line in entry.log if (match := NEEDED_CUDNN.search(line)))
    build = asdict(imported) if imported else {"version": None, "build": None, "cuda": None, "cudnn": None}
    runtime = OnnxRuntime(
        packages=tuple(f"{wheel.name} {wheel.version}" for wheel in runtime_wheels()),
        **{**build, "cudnn": build["cudnn"] or next(logged, None)},
        providers_in_build=available,
    )
    return MachineReport(
        partita_version=partita.__version__,
        onnxruntime=runtime,
        gpus=nvidia_gpus(),
        plugins=plugin_wheels(known_providers().values()),
        findings=environment_findings(
            tuple(known_providers().values()), imported_version=runtime.version, import_error=error
        ),
        providers=tuple(_entry_of(result, available) for result in checks),
        default_chain=chain,
        default_reason=reason,
        seconds=time.perf_counter() - began,
    )


def import_error(inventory: WorkerResult) -> str:
    """The error of importing ONNX Runtime, on one line."""
    error = (inventory.result or {}).get("error")
    if error:
        return one_line(f"{error['type']}: {error['text']}")
    return one_line(f"its process {inventory.how} while {STAGES.get(inventory.stage, inventory.stage)}")


def _entry_of(result: Check, available: Sequence[str]) -> ProviderEntry:
    """The report entry of one provider."""
    resolution = result.resolution
    provider = resolution.provider
    plugin = None if provider.library is None else str(provider.library)
    if plugin is None and provider.plugin is not None and (version := installed_version(provider.plugin.wheel)):
        plugin = f"{provider.plugin.wheel} {version}"
    return ProviderEntry(
        name=provider.name,
        ort_name=provider.ort_name,
        in_build=provider.ort_name in available,
        plugin=plugin,
        library_loads=result.library_loads,
        device_found=result.device_found,
        software_device=result.software,
        status="usable" if result.usable else "unavailable",
        reason=resolution.reason,
        evidence=resolution.evidence,
        remedy=None if resolution.remedy is None else str(resolution.remedy),
        remedies=remedy_records(resolution.remedy),
        seconds=result.seconds,
        devices=result.devices,
        options=tuple(map(OptionEntry.copy_of, provider.options)),
    )


def nvidia_gpus() -> tuple[Gpu, ...] | None:
    """The NVIDIA GPUs of this machine; None when nvidia-ml-py is not installed or finds no driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    with suppress(nvml.NVMLError), ExitStack() as opened:
        nvml.nvmlInit()
        opened.callback(nvml.nvmlShutdown)
        number = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 for 13.0
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=nvml.nvmlDeviceGetName(handle),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                driver=nvml.nvmlSystemGetDriverVersion(),
                cuda_driver=f"{number // 1000}.{number % 1000 // 10}",
            )
            for handle in handles
        )
    return None
