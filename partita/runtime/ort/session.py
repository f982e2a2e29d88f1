"""ONNX Runtime sessions on exactly the given providers, with what ONNX Runtime reports about placement."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from partita import streams
from partita.files import temporary_directory
from partita.observations.cpu import CpuSession
from partita.observations.facts import AssignedNode
from partita.observations.names import CPU
from partita.providers.cuda_dry_run.standins import BUILD_VARIABLE
from partita.providers.resolve import Resolution
from partita.runtime.ort.binding import FATAL, ON_HOST, Binding, FreshMemory
from partita.runtime.ort.buffers import (
    CUDA_MEMORY,
    HOST_MEMORY,
    NATIVE_ERRORS,
    Buffer,
    device_buffer,
    host_buffer,
    keeper_model,
)
from partita.runtime.ort.errors import ESCAPES
from partita.runtime.ort.evidence import parse_plan, parse_plan_devices
from partita.runtime.ort.native_log import Captured, captured_output
from partita.runtime.ort.registry import STRICT_KEY, preload_libraries, provider_options
from partita.runtime.place.model_file import all_tensors
from partita.signals import held

VERBOSE, INFO, WARNING = 0, 1, 2
WEIGHTS_FILE = "weights.data"
SMALL_BYTES = 1024
"""Constants up to this size stay in the file of an optimised graph."""


class NativeFailureError(Exception):
    """A session that could not be opened: ONNX Runtime's exception is the cause."""

    def __init__(self, error: Exception, log: tuple[str, ...]) -> None:
        super().__init__(str(error))
        self.error, self.log = error, log


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session is to be opened, beyond the providers."""

    threads: int | None = None
    """Intra-op threads; None for ONNX Runtime's choice."""
    observe: bool = False
    """Profile the first runs and keep the log at INFO."""
    quiet: bool = False
    """With `observe`: keep the log at WARNING all the same."""
    explain: bool = False
    """Keep the log at INFO without profiling anything."""
    verbose: bool = False
    """Keep all of the log."""
    optimise: bool = True
    """Let ONNX Runtime fold and fuse nodes; an experiment on one node wants it as it is."""
    strict: bool = False
    """Fail rather than let the CPU provider take a node."""
    model: bytes | None = None
    """The model to open in place of the file; its weights are still those beside the file."""
    weights: Path | None = None
    """The folder of the weights of `model`, where that is not the one of the file."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further entries of the session configuration."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that kernels read when they are built; a process of Partita has them while the session is opened."""
    scratch: Path | None = None
    """An existing folder for the plan, for many short sessions; None: a temporary folder for each."""
    optimised: Path | None = None
    """Where ONNX Runtime writes the graph as it runs it; the weights go into `WEIGHTS_FILE` beside it."""


@dataclass(frozen=True, slots=True)
class PortInfo:
    """An input or output as the session declares it."""

    name: str
    type: str
    """In ONNX Runtime's words: tensor(float), seq(tensor(int64)), …"""
    shape: tuple[int | str | None, ...]
    """Numbers, names of symbolic sizes, and None where even the name is unknown; empty for what is no tensor."""


class Session:
    """An open ONNX Runtime session and what it reported while it was opened. Close it; it owns a temporary folder."""

    def __init__(
        self,
        native: Any,
        path: Path,
        resolutions: tuple[Resolution, ...],
        log: tuple[str, ...],
        plan: str | None,
        cleanup: Callable[[], None],
        opening: Opening,
        load_seconds: float,
    ) -> None:
        """`plan`: text of the plan file. `cleanup`: removes the session's files."""
        self.path, self.log, self.load_seconds = path, log, load_seconds
        self.resolutions = resolutions
        """What became of each provider of the chain; `chain` completes it."""
        self.active, self.opening = resolutions, opening
        """On what it was opened, and how: to open another like it."""
        self.registered: tuple[str, ...] = tuple(native.get_providers())
        self.pins: dict[str, str] = {}
        """Nodes that are pinned, and the pin as the user wrote it; `chain` completes it."""
        self.cpu: CpuSession | None = None
        """How the CPU provider was set up; `chain` completes it."""
        self.later: Callable[[], int] | None = None
        """Puts packed weights into huge pages, and says how many bytes that are; `chain` completes it."""
        self.captures = any(entry.captures for entry in resolutions)
        """A provider was asked to record runs and to replay them."""
        self._recorded = 0
        self.profiling = opening.observe
        self._native, self._cleanup = native, cleanup
        self._keepers: dict[tuple[str, int] | bytes, Any] = {}
        self._assigned = _assigned_nodes(native)
        self._inputs_in = _places(native.get_inputs(), native.get_input_memory_infos())
        self._outputs_in = _places(native.get_outputs(), native.get_output_memory_infos())
        self.plan = None if plan is None else parse_plan(plan)
        self.plan_devices = None if plan is None else parse_plan_devices(plan)
        if not opening.observe:
            cleanup()

    @property
    def inputs(self) -> tuple[PortInfo, ...]:
        """Inputs that a run has to be given, in the order of the file."""
        return tuple(_port_info(port) for port in self._native.get_inputs())

    @property
    def outputs(self) -> tuple[PortInfo, ...]:
        """Outputs, in the order of the file."""
        return tuple(_port_info(port) for port in self._native.get_outputs())

    def failure_of_run(self, key: str) -> str:
        """ONNX Runtime's message when a run on inputs of 1 fails; empty when it succeeds, or without `key`.

        `key`: of the model's metadata, with the sizes of float inputs by name, in JSON.
        """
        sizes = json.loads(self.metadata(key) or "null")
        if sizes is None:
            return ""
        kinds = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
        feeds = {port.name: np.ones(sizes.get(port.name, port.shape), kinds[port.type]) for port in self.inputs}
        return self.run_once(feeds)[1]

    def metadata(self, key: str) -> str:
        """A value of the model's metadata; empty when there is none."""
        return str(self._native.get_modelmeta().custom_metadata_map.get(key, ""))

    def run_once(self, feeds: Mapping[str, Any]) -> tuple[list[Any] | None, str]:
        """Outputs of one run; None and what ONNX Runtime says when it fails."""
        try:
            with captured_output():
                return self._native.run(None, dict(feeds)), ""
        except NATIVE_ERRORS as error:
            return None, str(error) or type(error).__name__

    @property
    def wanted_memory(self) -> dict[str, str]:
        """Where the session wants each input and output: memory info name by port name."""
        return {name: place.memory for name, place in (*self._inputs_in.items(), *self._outputs_in.items())}

    def state_buffer(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """A zeroed buffer for the input or output `name`, in the memory the session wants it in."""
        place = self._inputs_in.get(name) or self._outputs_in[name]
        memory, owner = place.memory, self._owner(place.memory)
        if memory == HOST_MEMORY or owner is None:
            # A memory that no provider's record names is copied into in every run: slower, and right.
            return host_buffer(shape, dtype)
        return device_buffer(shape, dtype, memory, place.device_id, lambda: self._keeper(owner, dtype, len(shape)))

    def _owner(self, memory: str) -> Resolution | None:
        """The provider of the chain whose memory that is."""
        return next((entry for entry in self.resolutions if entry.provider.device_memory == memory), None)

    def on_device(self, name: str) -> bool:
        """Whether output `name` is made in memory of a device, from which it can be had when it is wanted."""
        memory = self._outputs_in[name].memory
        owner = self._owner(memory)
        return memory != HOST_MEMORY and owner is not None and owner.provider.reads_back

    def beside(self, name: str, model: bytes) -> Binding:
        """A binding of another model, all of it on the provider in whose memory the output `name` is made.

        Raises NativeFailureError where that does not take it. Opened once per model; it goes with this session.
        """
        if model not in self._keepers:
            memory = self._outputs_in[name].memory
            # One that compiles takes longer to build two nodes than they ever save.
            owners = [entry for entry in self.active if entry.provider.device_memory == memory]
            owner = next((entry for entry in owners if not entry.provider.compiles), None)
            if owner is None:
                raise NativeFailureError(RuntimeError(f"no provider of the chain runs single nodes in {memory}"), ())
            try:
                self._keepers[model] = _inner(model, owner, strict=True)
            except NATIVE_ERRORS as error:
                traceback.clear_frames(error.__traceback__)
                raise NativeFailureError(error, ()) from error
        return Binding(self._keepers[model], name)

    def forget(self, model: bytes) -> None:
        """Close the session of a model that was run beside this one, if there is one."""
        self._keepers.pop(model, None)

    def fresh_memory(self, name: str) -> FreshMemory:
        """Where an output is to be allocated that the next run reads as input `name`: where the session wants that."""
        place = self._inputs_in[name]
        if place.memory == HOST_MEMORY or self._owner(place.memory) is None:
            return ON_HOST
        return FreshMemory(place.memory, "cuda" if place.memory == CUDA_MEMORY else "gpu", place.device_id)

    def _keeper(self, owner: Resolution, dtype: str, rank: int) -> Any:
        """A small session on a provider, through which its memory can be had; made once per dtype and rank."""
        if (dtype, rank) not in self._keepers:
            self._keepers[dtype, rank] = _inner(keeper_model(dtype, rank), owner)
        return self._keepers[dtype, rank]

    def assigned(self) -> tuple[AssignedNode, ...] | None:
        """Nodes by provider, as of partitioning; None when this build has no list.

        ONNX Runtime 1.27 lists no nodes of a provider that prefers the NHWC layout (WebGPU).
        """
        return self._assigned

    def binding(self) -> Binding:
        """A new, empty binding of inputs and outputs to buffers."""
        return Binding(self._native, self.path.name, records=self.captures, notes_loops=self.opening.observe)

    def next_recording(self) -> int:
        """A number for a run to be recorded under: one that the session has not had."""
        self._recorded += 1
        return self._recorded

    def end_profiling(self) -> str | None:
        """Stop profiling for good and return the profile's JSON text; None when it was not on. Its file is deleted."""
        if not self.profiling:
            return None
        self.profiling = False
        with captured_output():  # ONNX Runtime announces the file it writes
            written = Path(self._native.end_profiling())
        text = written.read_text(encoding="utf-8") if written.is_file() else None
        self._cleanup()
        return text

    def leave(self) -> None:
        """Let a run that does not end have this session: nothing waits for it, and its profile is not asked for."""
        self.profiling = False

    def close(self) -> None:
        """End profiling, delete the temporary folder and release the native session. May be called twice.

        Release buffers on a device first: memory that outlives its session crashes WebGPU (ONNX Runtime 1.27).
        """
        self.end_profiling()
        self._cleanup()
        self._keepers.clear()
        self._native = None

    def __del__(self) -> None:
        """Close it when a signal ended the verb before the session was in a `with` block."""
        if hasattr(self, "_cleanup"):  # else it was never open
            self.close()


def _inner(model: bytes, owner: Resolution, *, strict: bool = False) -> Any:
    """A native session of a small model on the provider `owner`; `strict`: on no other."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    if strict:
        options.intra_op_num_threads = 1
        options.add_session_config_entry(STRICT_KEY, "1")
    providers = _chosen_providers(options, [owner.uncaptured()])  # it runs with tensors of many shapes
    return ort.InferenceSession(model, options, providers=providers, enable_fallback=0)


def _assigned_nodes(native: Any) -> tuple[AssignedNode, ...] | None:
    """Nodes by provider, from ONNX Runtime's assignment list; None when this build has none."""
    if not hasattr(native, "get_provider_graph_assignment_info"):
        return None
    return tuple(
        AssignedNode(node.name, node.op_type, node.domain, part.ep_name, index)
        for index, part in enumerate(native.get_provider_graph_assignment_info())
        for node in part.get_nodes()
    )


def _port_info(port: Any) -> PortInfo:
    """One input or output as plain data."""
    return PortInfo(str(port.name), str(port.type), tuple(port.shape or ()))


@dataclass(frozen=True, slots=True)
class Place:
    """A memory, as plain data: ONNX Runtime's own object is gone with its session."""

    memory: str
    device_id: int


def _places(ports: Sequence[Any], infos: Sequence[Any]) -> dict[str, Place]:
    """The memory of each port."""
    return {str(port.name): Place(str(info.name), int(info.device_id)) for port, info in zip(ports, infos, strict=True)}


def open_native(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """Open `path` on the providers of `active`, in their order. Raises NativeFailureError when ONNX Runtime does.

    ONNX Runtime always registers the CPU provider, last. The Python package's own retries on it are off.
    """
    with held():  # a signal cannot end native code, and behind it there must be a session that can be closed
        return _open_held(path, active, opening)


def _open_held(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """The same, while signals are held."""
    temporary = temporary_directory() if opening.scratch is None else None
    folder = Path(temporary.name) if temporary is not None else opening.scratch
    assert folder is not None
    # ONNX Runtime writes its plan there. The file must not exist: ONNX Runtime would obey it instead.
    plan = folder / "plan.json"
    cleanup = temporary.cleanup if temporary is not None else partial(plan.unlink, missing_ok=True)
    captured, began = Captured(), time.perf_counter()
    try:
        if any(resolution.provider.preload for resolution in active) and not os.environ.get(BUILD_VARIABLE):
            preload_libraries()  # in a dry run it would bring real CUDA libraries in place of the stubs
        options = _session_options(plan, active, opening, opening.weights or path.parent)
        with captured_output() as captured, _own_settings(opening):
            try:
                providers = _chosen_providers(options, active)
                native = ort.InferenceSession(opening.model or path, options, providers=providers, enable_fallback=0)
            except NATIVE_ERRORS as error:
                # The frames hold the half-open session. It logs when it goes, which must be while that is captured.
                traceback.clear_frames(error.__traceback__)
                raise
        native.disable_fallback()
        text = plan.read_text(encoding="utf-8") if plan.is_file() else None
        seconds = time.perf_counter() - began
        return Session(native, path, tuple(active), captured.lines, text, cleanup, opening, seconds)
    except NATIVE_ERRORS as error:
        cleanup()
        if ESCAPES.search(str(error)) and opening.weights is None:
            return _open_held(path, active, _without_links(path, opening))
        raise NativeFailureError(error, captured.lines) from error
    except BaseException:
        cleanup()
        raise


@contextmanager
def _own_settings(opening: Opening) -> Iterator[None]:
    """Set the log level and the environment variables of ONNX Runtime for an opening, in a process of Partita alone."""
    if not streams.own_process:
        yield
        return
    before = {name: os.environ.get(name) for name in opening.environment}
    ort.set_default_logger_severity(_log_level(opening))
    os.environ.update(opening.environment)
    try:
        yield
    finally:
        ort.set_default_logger_severity(WARNING)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _without_links(path: Path, opening: Opening) -> Opening:
    """Name weights by their link targets; ONNX Runtime before 1.27 follows none (microsoft/onnxruntime#27353)."""
    import onnx

    model = onnx.load_from_string(opening.model) if opening.model else onnx.load(path, load_external_data=False)
    places = [entry for tensor in all_tensors(model) for entry in tensor.external_data if entry.key == "location"]
    files = [(path.parent / entry.value).resolve() for entry in places]
    home = Path(os.path.commonpath([file.parent for file in files]))
    for entry, file in zip(places, files, strict=True):
        entry.value = file.relative_to(home).as_posix()
    return replace(opening, model=model.SerializeToString(), weights=home)


def _log_level(opening: Opening) -> int:
    """Severity from which ONNX Runtime logs: nothing where the log would go to the stderr of a user's program."""
    if not streams.own_process:
        return FATAL
    if opening.verbose:
        return VERBOSE
    return INFO if opening.explain or (opening.observe and not opening.quiet) else WARNING


def _chosen_providers(options: Any, active: Sequence[Resolution]) -> list[Any] | None:
    """Providers and their options as ONNX Runtime takes them. With a plugin among them all go into `options`."""
    plugins = any(resolution.library is not None for resolution in active)
    listed: list[Any] = []
    for resolution in active:
        for key, value in resolution.session_config.items():
            options.add_session_config_entry(key, value)
        provider, plugin = resolution.provider, resolution.library is not None
        prefix = "" if plugin else provider.option_prefix
        entries = provider_options(options, provider.ort_name, resolution.provider_options, prefix, plugin)
        if not plugins:
            listed += entries
        elif not plugin and provider.ort_name != CPU:
            options.add_provider(provider.ort_name, resolution.provider_options)
    return None if plugins else listed


def _session_options(plan: Path, active: Sequence[Resolution], opening: Opening, weights: Path) -> Any:
    """Options of one session. `weights`: the folder of the model's external data."""
    options = ort.SessionOptions()
    options.log_severity_level = _log_level(opening)
    options.intra_op_num_threads = opening.threads or 0
    if not opening.optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    config = {
        "session.node_partition_config_file": str(plan),
        "session.record_ep_graph_assignment_info": "1",
        **opening.config,
    }
    if opening.strict:
        config[STRICT_KEY] = "1"
    if opening.model is not None:
        config["session.model_external_initializers_file_folder_path"] = str(weights)
    if opening.optimised is not None:
        options.optimized_model_filepath = str(opening.optimised)
        config["session.optimized_model_external_initializers_file_name"] = WEIGHTS_FILE
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = str(SMALL_BYTES)
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    if opening.observe:
        options.enable_profiling = True
        options.profile_file_prefix = str(plan.parent / "profile")
    return options
