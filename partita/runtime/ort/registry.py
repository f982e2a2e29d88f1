"""What the installed ONNX Runtime is and offers: build, providers, plugin libraries, devices; and one model run alone.

With session.py the only module that imports onnxruntime. Importing it loads ONNX Runtime, which a broken installation
can turn into a crash: whoever wants to survive that asks `provider_check`, which does this in a child process.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita.observations.names import CPU

NATIVE = ort.capi.onnxruntime_pybind11_state
STRICT_KEY = "session.disable_cpu_ep_fallback"
OFFERED: dict[Path, tuple[str, ...]] = {}
"""Libraries that this process has registered, and the providers that each offers a device for."""


@dataclass(frozen=True, slots=True)
class OrtBuild:
    """The installed ONNX Runtime. None where its build does not say."""

    version: str
    build: str
    package: str | None
    """Name of the wheel it was built for."""
    cuda: str | None
    """CUDA version it was built with, e.g. 13.0."""
    cudnn: str | None


@dataclass(frozen=True, slots=True)
class EpDevice:
    """A device that a provider offers, as ONNX Runtime lists it."""

    ort_name: str
    ep_vendor: str
    kind: str
    """CPU, GPU or NPU."""
    vendor: str
    vendor_id: int
    device_id: int
    metadata: dict[str, str]
    """What the driver says of the device, and the provider of itself (keys that begin with ep.)."""


def ort_build() -> OrtBuild:
    """Version and build of the installed ONNX Runtime."""
    from onnxruntime.capi import build_and_package_info as info

    return OrtBuild(
        version=str(ort.__version__),
        build=str(ort.get_build_info()).removeprefix("ORT Build Info: "),
        package=getattr(info, "package_name", None),
        cuda=getattr(info, "cuda_version", None) or None,
        cudnn=getattr(info, "cudnn_version", None) or None,
    )


def available_ort_names() -> tuple[str, ...]:
    """ONNX Runtime's names of the providers compiled into it, which says nothing of whether they can start."""
    return tuple(ort.get_available_providers())


def ep_devices() -> tuple[EpDevice, ...]:
    """Devices of all providers, plugins that were registered included; empty where ONNX Runtime cannot list them."""
    return tuple(_describe_device(device) for device in _native_devices())


def _native_devices() -> tuple[Any, ...]:
    """ONNX Runtime's own device objects; versions before 1.22 have none."""
    return tuple(ort.get_ep_devices()) if hasattr(ort, "get_ep_devices") else ()


def hardware() -> tuple[tuple[str, int, int], ...]:
    """Kind, vendor id and device id of each device that ONNX Runtime finds by itself."""
    listing = getattr(NATIVE, "get_hardware_devices", None)  # since 1.24
    found = listing() if listing else ()
    return tuple((_kind_of(device), int(device.vendor_id), int(device.device_id)) for device in found)


def _kind_of(hardware: Any) -> str:
    """CPU, GPU or NPU."""
    return str(hardware.type).rpartition(".")[2]


def _describe_device(device: Any) -> EpDevice:
    """One device as plain data."""
    hardware = device.device
    about = {f"ep.{key}": str(value) for key, value in dict(device.ep_metadata).items()}
    return EpDevice(
        ort_name=str(device.ep_name),
        ep_vendor=str(device.ep_vendor),
        kind=_kind_of(hardware),
        vendor=str(hardware.vendor),
        vendor_id=int(hardware.vendor_id),
        device_id=int(hardware.device_id),
        metadata={**{key: str(value) for key, value in dict(hardware.metadata).items()}, **about},
    )


def register_library(name: str, path: Path) -> tuple[str, ...]:
    """Register a plugin library under `name`; ONNX Runtime's names of the providers that it offers a device for.

    A library is registered once per process, under the first name; later calls answer as the first one did. Raises
    what ONNX Runtime raises when the library cannot be loaded.
    """
    if path not in OFFERED:
        before = len(_native_devices())
        ort.register_execution_provider_library(name, str(path))
        OFFERED[path] = tuple(dict.fromkeys(str(device.ep_name) for device in _native_devices()[before:]))
    return OFFERED[path]


@cache
def all_operator_schemas() -> tuple[Any, ...]:
    """Schemas of every operator that this build knows, its own domains included; empty where it cannot list them."""
    listing = getattr(NATIVE, "get_all_operator_schema", None)
    return tuple(listing()) if listing else ()


def preload_libraries() -> None:
    """Load the CUDA libraries that are installed as Python packages, where the system's loader does not look.

    What is not there is left for the provider to complain about: ONNX Runtime would print it to stdout.
    """
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            preload()


def provider_options(options: Any, ort_name: str, given: Mapping[str, str], prefix: str, plugin: bool) -> list[Any]:
    """Put one provider and its options into session options; returns what to pass as `providers`.

    `prefix`: the provider inside ONNX Runtime reads its options from the session configuration under it. `plugin`: the
    provider comes from a registered library.
    """
    if plugin:
        options.add_provider_for_devices([d for d in _native_devices() if d.ep_name == ort_name], dict(given))
        return []
    if prefix:
        for name, value in given.items():
            options.add_session_config_entry(f"{prefix}{name}", value)
        return [ort_name]
    return [(ort_name, dict(given))]


def run_alone(
    model: bytes,
    ort_name: str,
    given: Mapping[str, str],
    *,
    prefix: str,
    plugin: bool,
    feed: Mapping[str, npt.NDArray[Any]],
) -> tuple[list[npt.NDArray[Any]], dict[str, str]]:
    """Run a model on one provider and on no other; its outputs, and the provider's options.

    Raises what ONNX Runtime raises when the provider does not start or a node would have to run elsewhere.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if ort_name != CPU:
        options.add_session_config_entry(STRICT_KEY, "1")
    providers = provider_options(options, ort_name, given, prefix, plugin)
    session = ort.InferenceSession(model, options, **({"providers": providers} if providers else {}), enable_fallback=0)
    session.disable_fallback()
    outputs = [np.asarray(value) for value in session.run(None, dict(feed))]
    return outputs, dict(session.get_provider_options().get(ort_name, {}))
