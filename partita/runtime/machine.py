"""This machine's hardware and packages for reports, conflicts between packages, and the report of `partita providers`.

Packages with ONNX Runtime and its plugins are read from metadata alone. `describe_machine` imports ONNX Runtime only in
worker processes.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import partita
from partita import extras
from partita.machine import EnvironmentFinding, Gpu, MachineReport, OnnxRuntime, OptionEntry, ProviderEntry
from partita.observations.records import Environment, InstalledWheel, remedy_records
from partita.observations.text_format import listing
from partita.providers.base import Provider
from partita.providers.options import generic_provider
from partita.providers.resolve import (
    Failure,
    Resolution,
    all_names,
    installed_version,
    known_providers,
    one_line,
    resolve,
)
from partita.remedies import Remedy
from partita.runtime.chain.provider_check import (
    STAGES,
    TIMEOUT_SECONDS,
    Check,
    WorkerResult,
    best_chain,
    check,
    examine,
)
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
        onnxruntime_version=str(build.version),
        onnxruntime_build=str(build.build),
        packages={name: version for name, found in versions.items() for version in found},
    )


def describe_machine(extra: Sequence[Provider] = (), *, timeout_seconds: float = TIMEOUT_SECONDS) -> MachineReport:
    """Check every known provider, every other provider of this ONNX Runtime, and `extra`; takes seconds."""
    began = time.perf_counter()
    (inventory,) = examine([None], timeout_seconds=timeout_seconds)
    found = inventory.result or {}
    available: tuple[str, ...] = found.get("available", ())
    imported: OnnxRuntime | None = found.get("build")
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
    runtime, wheels = imported or OnnxRuntime(), runtime_wheels()
    packages, cudnn = tuple(f"{wheel.name} {wheel.version}" for wheel in wheels), runtime.cudnn or next(logged, None)
    runtime = runtime.model_copy(update={"packages": packages, "cudnn": cudnn, "providers_in_build": available})
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
    return ProviderEntry.copy_of(
        result,
        name=provider.name,
        ort_name=provider.ort_name,
        in_build=provider.ort_name in available,
        plugin=plugin,
        software_device=result.software,
        status="usable" if result.usable else "unavailable",
        reason=resolution.reason,
        evidence=resolution.evidence,
        remedy=None if resolution.remedy is None else str(resolution.remedy),
        remedies=remedy_records(resolution.remedy),
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


# --- packages ---------------------------------------------------------------------------------------------------------

REINSTALL = Remedy("reinstall it to restore its files", ("pip", "install", "--force-reinstall", "{wheel}=={version}"))
UNINSTALL = Remedy("install only the wheel you need, after", ("pip", "uninstall", "--yes", "{wheels}"))
FITTING = Remedy("install the required version", ("pip", "install", "{wheel}{specifier}"))
MARK = "onnxruntime/__init__.py"
"""A file in every ONNX Runtime wheel; two wheels in one folder overwrite it."""
HOSTS = frozenset(
    {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu", "onnxruntime-directml"}
)


class Wheel(NamedTuple):
    """A distribution that owns the onnxruntime package."""

    name: str
    version: str
    folder: str
    """The folder of the package."""


def runtime_wheels() -> tuple[Wheel, ...]:
    """Every distribution that owns the onnxruntime package, in the order of Python's path."""
    owners = (
        Wheel(str(found.metadata["Name"]), found.version, str(Path(str(found.locate_file(""))).resolve()))
        for found in metadata.distributions()
        if owns_runtime(found.read_text("RECORD") or "")
    )
    return tuple(dict.fromkeys(owners))


def owns_runtime(record: str) -> bool:
    """Whether a RECORD lists the package itself. Searched as text, because the RECORD of a large package is long."""
    return record.startswith(f"{MARK},") or f"\n{MARK}," in record


def plugin_wheels(providers: Iterable[Provider]) -> dict[str, str]:
    """Versions of the installed plugin packages of these providers, by package name."""
    wheels = (provider.plugin.wheel for provider in providers if provider.plugin)
    return {wheel: version for wheel in wheels if (version := installed_version(wheel))}


def environment_findings(
    providers: Sequence[Provider], *, imported_version: str | None, import_error: str | None
) -> tuple[EnvironmentFinding, ...]:
    """Problems of the installed packages, most serious first.

    `imported_version`: of the ONNX Runtime that Python imports; None if the import fails. `import_error`: its error.
    """
    owners, plugins = runtime_wheels(), plugin_wheels(providers)
    found = [duplicate_runtime(owners)] if len(owners) > 1 else []
    installed = f"{_names(owners)} is installed, but"
    reinstall = [REINSTALL.filled(wheel=owner.name, version=owner.version) for owner in owners[:1]]
    if not owners and imported_version is None:
        evidence = "ONNX Runtime is not installed"
        if plugins:
            named = listing(f"{name} {version}" for name, version in plugins.items())
            evidence = f"{named} needs ONNX Runtime, which is not installed"
        found.append(Failure("not_in_build", evidence, extras.runtime_remedy()))
    elif imported_version is None:
        evidence = f"{installed} cannot be imported: {import_error or 'unknown reason'}"
        found.append(Failure("initialisation_failed", evidence, reinstall[0]))
    elif len(owners) == 1 and owners[0].version != imported_version:
        evidence = f"{installed} the onnxruntime that Python imports is {imported_version}"
        found.append(Failure("version_mismatch", evidence, reinstall[0]))
    if owners:
        found += (each for wheel in plugins for each in _plugin_mismatches(wheel, owners))
    for name, (version, needed) in extras.excluded_versions().items():
        evidence = f"{name} {version} is not supported; Partita needs {needed}"
        found.append(Failure("version_mismatch", evidence, FITTING.filled(wheel=name, specifier=needed)))
    return tuple(
        EnvironmentFinding.copy_of(each, remedy=str(each.remedy), remedies=remedy_records(each.remedy))
        for each in found
    )


def _names(owners: Iterable[Wheel]) -> str:
    """`onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1`."""
    return listing(f"{owner.name} {owner.version}" for owner in owners)


def duplicate_runtime(owners: Sequence[Wheel]) -> Failure:
    """The failure of several wheels: they overwrite each other in one folder, or the first hides the others.

    The remedy uninstalls all of them, because each has lost files to the others.
    """
    mixed = [owner for owner in owners if owner.folder == owners[0].folder]
    if len(mixed) > 1:
        evidence = f"{_names(mixed)} share the folder {owners[0].folder} and overwrote each other's files"
    else:
        hidden = _names(owner for owner in owners if owner.folder != owners[0].folder)
        evidence = f"{_names(mixed)} in {owners[0].folder} hides {hidden}, later on Python's path"
    remedy = UNINSTALL.filled(wheels=tuple(dict.fromkeys(owner.name for owner in owners)))
    return Failure("duplicate_runtime", evidence, remedy)


def _plugin_mismatches(wheel: str, owners: Sequence[Wheel]) -> Iterator[Failure]:
    """Requirements of a plugin package that the installed ONNX Runtime does not meet."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in metadata.requires(wheel) or ():
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.name.lower() not in HOSTS or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        if not any(needed.specifier.contains(owner.version, prereleases=True) for owner in owners):
            evidence = f"{wheel} {installed_version(wheel)} requires {needed.name}{needed.specifier}"
            evidence += f", and {_names(owners)} is installed"
            remedy = FITTING.filled(wheel=owners[0].name, specifier=needed.specifier)
            yield Failure("version_mismatch", evidence, remedy)
