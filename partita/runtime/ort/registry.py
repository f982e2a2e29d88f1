"""The installed ONNX Runtime: build, providers, plugin libraries, devices, and a run of a model on one provider.

Together with session.py the only module that imports onnxruntime, which crashes in a broken installation;
`provider_check` uses it in a worker process.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita import process
from partita.machine import Device, OnnxRuntime
from partita.observations.names import CPU
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.native_log import INFO, WARNING, captured_output
from partita.runtime.ort.session_options import STRICT_KEY, chosen_providers
from partita.runtime.worker.parent import Worker

NATIVE = ort.capi.onnxruntime_pybind11_state
COMPATIBILITY = "ep.compatibility"
"""Entry of a device's metadata with ONNX Runtime's answer."""
COMPILED_FOR = "ep_compatibility_info."
"""Prefix of a compiled model's metadata keys, before the provider's name."""
OFFERED: dict[Path, tuple[str, ...]] = {}
"""Libraries that this process has registered, with the providers that have a device."""
FROM_PLUGINS: set[str] = set()
"""Providers of registered libraries that ONNX Runtime (from 1.32) lists with those of the build."""


def ort_build() -> OnnxRuntime:
    """Version and build of the installed ONNX Runtime."""
    from onnxruntime.capi import build_and_package_info as info

    return OnnxRuntime(
        version=str(ort.__version__),
        build=str(ort.get_build_info()).removeprefix("ORT Build Info: "),
        cuda=getattr(info, "cuda_version", None) or None,
        cudnn=getattr(info, "cudnn_version", None) or None,
    )


def available_ort_names() -> tuple[str, ...]:
    """ONNX Runtime's names of the providers in the build, which may not start; without those of registered plugins."""
    return tuple(name for name in ort.get_available_providers() if name not in FROM_PLUGINS)


def ep_devices(*, check: bool = False) -> tuple[Device, ...]:
    """Devices of all providers, including registered plugins. `check`: with ONNX Runtime's incompatibilities."""

    def found(entry: Any) -> dict[str, str]:
        about = {f"ep.{key}": str(value) for key, value in dict(entry.ep_metadata).items()}
        return {**about, COMPATIBILITY: _incompatibility(str(entry.ep_name), entry.device)} if check else about

    return tuple(
        Device(
            ort_name=str(entry.ep_name),
            ep_vendor=str(entry.ep_vendor),
            kind=_kind_of(entry.device),
            vendor=str(entry.device.vendor),
            vendor_id=int(entry.device.vendor_id),
            device_id=int(entry.device.device_id),
            metadata={key: str(value) for key, value in dict(entry.device.metadata).items()} | found(entry),
        )
        for entry in ort.get_ep_devices()
    )


def _incompatibility(ort_name: str, device: Any) -> str:
    """ONNX Runtime's answer whether a device is known not to work with a provider, on one line."""
    ask = getattr(NATIVE, "get_hardware_device_ep_incompatibility_details", None)
    if ask is None:
        return "incompatibilities unknown: this ONNX Runtime has no check"
    try:
        answer = ask(ort_name, device)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises exceptions of its own
        return f"incompatibilities unknown: {one_line(str(error))}"
    if not answer["reasons_bitmask"]:
        return "no incompatibility known to ONNX Runtime"
    reasons = NATIVE.OrtDeviceEpIncompatibilityReason.__members__.items()
    named = [name.lower() for name, reason in reasons if int(reason) & answer["reasons_bitmask"]]
    return f"ONNX Runtime reports {', '.join(named)}: {one_line(answer['notes'] or '')} ({answer['error_code']})"


def model_compatibility(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """A note per provider that a model was compiled for: whether ONNX Runtime finds it compatible with the devices."""
    ask = getattr(NATIVE, "get_model_compatibility_for_ep_devices", None)
    notes = []
    for key, info in metadata.items():
        if key.startswith(COMPILED_FOR):
            name = key.removeprefix(COMPILED_FOR)
            devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
            answer = ask(devices, info).name if ask and devices else "no device here"
            known = answer.startswith(("EP_SUPPORTED", "EP_UNSUPPORTED"))
            notes.append(f"compiled for {name} ({info}); compatibility: {answer if known else f'unknown ({answer})'}")
    return tuple(notes)


def hardware() -> tuple[tuple[str, int, int], ...]:
    """Kind, vendor id and device id of each device that ONNX Runtime detects."""
    listing = getattr(NATIVE, "get_hardware_devices", None)  # not in all builds, e.g. OpenVINO's 1.24
    found = listing() if listing else ()
    return tuple((_kind_of(device), int(device.vendor_id), int(device.device_id)) for device in found)


def _kind_of(hardware: Any) -> str:
    """CPU, GPU or NPU."""
    return str(hardware.type).rpartition(".")[2]


def register_library(name: str, path: Path) -> tuple[str, ...]:
    """Register a plugin library as `name`; return ONNX Runtime's names of its providers with a device.

    A library is registered once per process, under the first name; later calls return the first result. Raises ONNX
    Runtime's exceptions when the library cannot be loaded.
    """
    if path not in OFFERED:
        before, built_in = len(ort.get_ep_devices()), available_ort_names()
        ort.register_execution_provider_library(name, str(path))
        FROM_PLUGINS.update(set(available_ort_names()).difference(built_in))
        OFFERED[path] = tuple(dict.fromkeys(str(device.ep_name) for device in ort.get_ep_devices()[before:]))
    return OFFERED[path]


@cache
def all_operator_schemas() -> tuple[Any, ...]:
    """Schemas of every operator of this build, including its own domains."""
    return tuple(NATIVE.get_all_operator_schema())


def provider_identity(resolution: Resolution, environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything besides the model that the behaviour of a provider may depend on."""
    chosen = {name for entry in known_providers().values() for name in entry.variables}
    options = resolution.provider_options
    return {
        "build": ort_build().model_dump(),
        "provider": resolution.provider.ort_name,
        "options": options,
        "libraries": [_stamp(path) for path in (resolution.library, *map(Path, options.values())) if path is not None],
        "devices": [entry.model_dump() for entry in ep_devices()],
        "hardware": [list(entry) for entry in hardware()],
        "variables": {name: value for name, value in environment.items() if name in chosen or name.startswith(PREFIX)},
    }


def _stamp(path: Path) -> list[Any]:
    """Path, size and modification time of a file; only the text if it is no path of a file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return [str(path)]
    return [str(path), status.st_size, status.st_mtime_ns]


def preload_libraries() -> None:
    """Load CUDA libraries that are installed as Python packages, which the system's loader does not find.

    Missing libraries are skipped, because ONNX Runtime would print messages to stdout; the provider reports them.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()


def run_alone(
    model: bytes, resolution: Resolution, feed: Mapping[str, npt.NDArray[Any]]
) -> tuple[list[npt.NDArray[Any]], dict[str, str]]:
    """Run a model on one provider without fallback; return its outputs and the provider's options.

    Raises ONNX Runtime's exceptions when the provider does not start or does not support a node.
    """
    options, name = ort.SessionOptions(), resolution.provider.ort_name
    options.intra_op_num_threads = 1
    if name != CPU:
        options.add_session_config_entry(STRICT_KEY, "1")
    session = ort.InferenceSession(model, options, providers=chosen_providers(options, [resolution]), enable_fallback=0)
    session.disable_fallback()
    outputs = [np.asarray(value) for value in session.run(None, dict(feed))]
    return outputs, dict(session.get_provider_options().get(name, {}))


@cache
def output_types(model: bytes) -> dict[str, tuple[str, list[int | str | None]]]:
    """Type, e.g. tensor(float), and sizes of each output as ONNX Runtime infers them; empty if it cannot open it."""
    options: Any = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model, options, providers=[CPU])
    except Exception:  # noqa: BLE001 - ONNX Runtime raises exceptions of its own
        return {}
    return {port.name: (port.type, port.shape) for port in session.get_outputs()}


RESTORES = "DequantizeLinear"
"""Operator that remains if the optimiser did not fuse it with a MatMul of quantised weights."""
UNPACKED = "unpacked compute mode"
"""MatMulNBits on the CPU provider: no kernel for this form on this processor, so every run dequantises the whole matrix
(contrib_ops/cpu/quantization/matmul_nbits.cc, `Compute`)."""


def unpacks_weights(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the CPU provider dequantises quantised weights in every run of `model`, by one run on zeros.

    `sizes`: of its inputs. Run it in a worker process if the log must not be captured in this process. Raises ONNX
    Runtime's exceptions.
    """
    if not process.own_process:
        with Worker(__name__) as worker:
            answer: bool = worker.call("unpacks_weights", model, sizes)
            return answer
    import onnx

    with TemporaryDirectory() as folder:
        options: Any = ort.SessionOptions()
        options.log_severity_level = INFO
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        kinds = {"tensor(int64)": np.int64, "tensor(float16)": np.float16}
        with captured_output() as captured:
            ort.set_default_logger_severity(INFO)
            try:
                session = ort.InferenceSession(model, options, providers=[CPU])
                ports = session.get_inputs()
                session.run(None, {p.name: np.zeros(sizes[p.name], kinds.get(p.type, np.float32)) for p in ports})
            finally:
                ort.set_default_logger_severity(WARNING)
        optimised = onnx.load(options.optimized_model_filepath).graph
    return any(UNPACKED in line for line in captured.lines) or any(node.op_type == RESTORES for node in optimised.node)


HANDLERS = {"unpacks_weights": unpacks_weights}
