"""ONNX Runtime sessions on exactly the given providers, with ONNX Runtime's information about placement."""

from __future__ import annotations

import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from partita import process
from partita.files import profiles_folder, temporary_directory
from partita.observations.facts import AssignedNode
from partita.observations.records import CpuSession
from partita.providers.cuda_dry_run.stub_build import BUILD_VARIABLE
from partita.providers.resolve import Resolution
from partita.runtime.ort.binding import ON_HOST, Binding, PortMemory
from partita.runtime.ort.buffers import HOST_MEMORY, NATIVE_ERRORS, Buffer, device_buffer, host_buffer, keeper_model
from partita.runtime.ort.errors import ESCAPES
from partita.runtime.ort.native_log import FATAL, WARNING, CapturedLog, RunLog, captured_output, parse_plan
from partita.runtime.ort.registry import preload_libraries
from partita.runtime.ort.session_options import (
    GRAPH_FILE,
    STRICT_KEY,
    Opening,
    chosen_providers,
    log_level,
    session_options,
)
from partita.runtime.place.model_file import all_tensors
from partita.signals import hold_signals

EP_CONTEXT = "EPContext"
"""Operator of a compiled subgraph in a file."""
SAVING = "Serializing optimized model with"
"""A warning of every session that writes its optimised graph."""
NOT_SAVED = re.compile(r"(?i)serializ|optimized[ _]model|external (data|initializers?) file")
"""Errors of writing the optimised graph, e.g. with a plugin that compiles subgraphs."""
TIMED_SECONDS = 0.05


class NativeFailureError(Exception):
    """ONNX Runtime could not open a session; its exception is the cause."""

    def __init__(self, error: Exception, log: tuple[str, ...]) -> None:
        super().__init__(str(error))
        self.error, self.log = error, log


class Session:
    """An open ONNX Runtime session with its log and plan. Close it; it owns a temporary folder."""

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
        optimised: bytes | None = None,
    ) -> None:
        """`plan`: text of the plan file. `cleanup`: removes the session's files. `optimised`: the optimised graph."""
        self.optimised = optimised
        self.path, self.log, self.load_seconds = path, log, load_seconds
        self.resolutions = resolutions
        """State of each provider of the chain; set by `chain`."""
        self.active, self.opening = resolutions, opening
        """Providers and options of the opening, to open another session like it."""
        self.registered: tuple[str, ...] = tuple(native.get_providers())
        self.pins: dict[str, str] = {}
        """Pinned nodes and their pins as the user wrote them; set by `chain`."""
        self.notes: tuple[str, ...] = ()
        """Notes on the opening; set by `chain`."""
        self.cpu: CpuSession | None = None
        """Settings of the CPU provider; set by `chain`."""
        self.later: Callable[[], int] | None = None
        """Moves packed weights into huge pages and returns the bytes; set by `chain`."""
        self.captures = any(entry.captures for entry in resolutions)
        """Whether graph capture is enabled for a provider."""
        self.watchers: list[Callable[[Binding], object]] = []
        """Called with a binding of this session before each of its runs."""
        self._recorded = 0
        self.run_log = RunLog()
        self.profiling = opening.observe
        self._native, self._cleanup = native, cleanup
        self._keepers: dict[tuple[str, int] | bytes, Any] = {}
        self._assigned = tuple(
            AssignedNode(node.name, node.op_type, node.domain, part.ep_name, index)
            for index, part in enumerate(native.get_provider_graph_assignment_info())
            for node in part.get_nodes()
        )
        self._inputs_in = _memories(native.get_inputs(), native.get_input_memory_infos())
        self._outputs_in = _memories(native.get_outputs(), native.get_output_memory_infos())
        self.plan, self.plan_devices = (None, None) if plan is None else parse_plan(plan)
        if not opening.observe:
            cleanup()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """ONNX Runtime's `NodeArg` of each required input, in the order of the file."""
        return tuple(self._native.get_inputs())

    @property
    def outputs(self) -> tuple[Any, ...]:
        """`NodeArg` of each output, in the order of the file."""
        return tuple(self._native.get_outputs())

    def seconds_of_run(self, feeds: Mapping[str, Any]) -> float:
        """Seconds of the fastest run within `TIMED_SECONDS`. Raises ONNX Runtime's exceptions."""
        fastest, end = math.inf, time.perf_counter() + TIMED_SECONDS
        while (began := time.perf_counter()) < end:
            self._native.run(None, feeds)
            fastest = min(fastest, time.perf_counter() - began)
        return fastest

    def metadata(self, key: str) -> str:
        """A value of the model's metadata; empty without one."""
        return str(self._native.get_modelmeta().custom_metadata_map.get(key, ""))

    def run_once(self, feeds: Mapping[str, Any]) -> tuple[list[Any] | None, str]:
        """Outputs of one run; if it fails, None and ONNX Runtime's message."""
        try:
            with captured_output():
                return self._native.run(None, dict(feeds)), ""
        except NATIVE_ERRORS as error:
            return None, str(error) or type(error).__name__

    @property
    def required_memory(self) -> dict[str, str]:
        """Required memory of each input and output: memory info name by port name."""
        return {name: place.memory for name, place in (*self._inputs_in.items(), *self._outputs_in.items())}

    def state_buffer(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """A zeroed buffer for the input or output `name`, in its required memory."""
        place = self._inputs_in.get(name) or self._outputs_in[name]
        memory, owner = place.memory, self._owner(place.memory)
        if memory == HOST_MEMORY or owner is None:
            # Memory unknown to all provider records is replaced by host memory, which ONNX Runtime copies in every
            # run.
            return host_buffer(shape, dtype)
        return device_buffer(shape, dtype, memory, place.device_id, lambda: self._keeper(owner, dtype, len(shape)))

    def _owner(self, memory: str) -> Resolution | None:
        """The provider of the chain that owns a memory."""
        return next((entry for entry in self.resolutions if entry.provider.device_memory == memory), None)

    def on_device(self, name: str) -> bool:
        """Whether output `name` is computed in readable device memory."""
        memory = self._outputs_in[name].memory
        owner = self._owner(memory)
        return memory != HOST_MEMORY and owner is not None and owner.provider.reads_back

    def binding_of(self, name: str, model: bytes) -> Binding:
        """A binding of another model that runs entirely on the provider of the output `name`.

        Raises NativeFailureError if that provider does not support the model. Opened once per model, and closed with
        this session.
        """
        if model not in self._keepers:
            memory = self._outputs_in[name].memory
            # For a compiling provider, building two nodes takes longer than they save.
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
        """Close the session of a second model, if any."""
        self._keepers.pop(model, None)

    def fresh_memory(self, name: str) -> PortMemory:
        """The memory for an output that the next run reads as input `name`."""
        place = self._inputs_in[name]
        return ON_HOST if self._owner(place.memory) is None else place

    def _keeper(self, owner: Resolution, dtype: str, rank: int) -> Any:
        """A small session on a provider, for allocating its memory; one per dtype and rank."""
        if (dtype, rank) not in self._keepers:
            self._keepers[dtype, rank] = _inner(keeper_model(dtype, rank), owner)
        return self._keepers[dtype, rank]

    def assigned(self) -> tuple[AssignedNode, ...]:
        """Nodes by provider after partitioning.

        ONNX Runtime 1.27 omits nodes of a provider that prefers the NHWC layout (WebGPU).
        """
        return self._assigned

    def present_as(
        self, path: Path, opening: Opening, subgraphs: Mapping[str, Sequence[AssignedNode]], log: Sequence[str]
    ) -> None:
        """Present a session of a compiled graph as one of the graph `path` that it was compiled from.

        `subgraphs`: nodes in each EPContext node, by its name. `log`: log of the session that compiled them.
        """
        self.path, self.opening, self.log = path, opening, (*log, *self.log)
        self._assigned = tuple(
            replace(inner, provider=node.provider, subgraph=node.subgraph)
            for node in self._assigned
            for inner in (subgraphs[node.name] if node.op_type == EP_CONTEXT else (node,))
        )

    def binding(self) -> Binding:
        """A new, empty binding of inputs and outputs to buffers."""
        return Binding(
            self._native,
            self.path.name,
            records=self.captures,
            notes_loops=self.opening.observe,
            watchers=self.watchers,
            run_log=self.run_log,
        )

    def listening(self, phase: str) -> AbstractContextManager[None]:
        """Capture the log of a profiled run; see `RunLog`."""
        return self.run_log.of(phase) if self.profiling and self.opening.severity is None else nullcontext()

    def next_recording(self) -> int:
        """A new number for a captured graph."""
        self._recorded += 1
        return self._recorded

    def end_profiling(self) -> str | None:
        """Stop profiling and return the profile's JSON text; None if it was off. Its file is deleted."""
        if not self.profiling:
            return None
        self.profiling = False
        with captured_output():  # ONNX Runtime logs the file name
            written = Path(self._native.end_profiling())
        text = written.read_text(encoding="utf-8") if written.is_file() else None
        if text is not None and (folder := profiles_folder()) is not None:
            (folder / f"{self.path.stem}-{written.name}").write_text(text, encoding="utf-8")
        self._cleanup()
        return text

    def close(self) -> None:
        """End profiling, delete the temporary folder and release the native session. May be called repeatedly.

        Release device buffers first: memory that outlives its session crashes WebGPU (ONNX Runtime 1.27).
        """
        self.end_profiling()
        self._cleanup()
        self._keepers.clear()
        self._native = None

    def __del__(self) -> None:
        """Close the session if a signal ended the command before a `with` block."""
        if hasattr(self, "_cleanup"):  # otherwise it was never open
            self.close()


def _inner(model: bytes, owner: Resolution, *, strict: bool = False) -> Any:
    """A native session of a small model on the provider `owner`; `strict`: without the CPU provider."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    if strict:
        options.intra_op_num_threads = 1
        options.add_session_config_entry(STRICT_KEY, "1")
    providers = chosen_providers(options, [owner.uncaptured()])  # it runs with tensors of many shapes
    return ort.InferenceSession(model, options, providers=providers, enable_fallback=0)


def _memories(ports: Sequence[Any], infos: Sequence[Any]) -> dict[str, PortMemory]:
    """The memory of each port."""
    pairs = zip(ports, infos, strict=True)
    return {str(port.name): PortMemory(str(info.name), int(info.device_id)) for port, info in pairs}


@hold_signals()  # a signal cannot stop native code, and the session must be closable afterwards
def open_native(path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """Open `path` on the providers of `active`, in their order. Raises NativeFailureError for ONNX Runtime's
    exceptions.

    ONNX Runtime always registers the CPU provider, last. The Python package's retries on the CPU provider are disabled.
    """
    if opening.observe:
        profiles_folder()  # an unusable one is an error before the run
    if opening.saves_graph is None:
        compiles = any(resolution.provider.compiles for resolution in active)
        opening = replace(opening, saves_graph=opening.observe and not compiles)
    temporary = temporary_directory() if opening.scratch is None else None
    folder = Path(temporary.name) if temporary is not None else opening.scratch
    assert folder is not None
    # The plan file must not exist: ONNX Runtime would read it instead of writing it.
    plan = folder / "plan.json"
    cleanup = temporary.cleanup if temporary is not None else partial(plan.unlink, missing_ok=True)
    captured, began = CapturedLog(), time.perf_counter()
    try:
        if any(resolution.provider.preload for resolution in active) and not os.environ.get(BUILD_VARIABLE):
            preload_libraries()  # in a dry run it would load real CUDA libraries instead of the stubs
        options = session_options(plan, active, opening, opening.weights or path.parent)
        with captured_output() as captured, _own_settings(opening):
            try:
                providers = chosen_providers(options, active)
                native = ort.InferenceSession(opening.model or path, options, providers=providers, enable_fallback=0)
            except NATIVE_ERRORS as error:
                # The frames reference the half-open session, which logs when destroyed, so that must be inside the
                # capture.
                traceback.clear_frames(error.__traceback__)
                raise
        native.disable_fallback()
        text = plan.read_text(encoding="utf-8") if plan.is_file() else None
        graph = plan.with_name(GRAPH_FILE).read_bytes() if opening.saves_graph else None
        seconds = time.perf_counter() - began
        log = tuple(line for line in captured.lines if SAVING not in line)
        return Session(native, path, tuple(active), log, text, cleanup, opening, seconds, graph)
    except NATIVE_ERRORS as error:
        cleanup()
        if opening.saves_graph and opening.observe and NOT_SAVED.search(str(error)):
            return open_native(path, active, replace(opening, saves_graph=False))
        if ESCAPES.search(str(error)) and opening.weights is None:
            return open_native(path, active, _without_links(path, opening))
        raise NativeFailureError(error, captured.lines) from error
    except BaseException:
        cleanup()
        raise


@contextmanager
def _own_settings(opening: Opening) -> Iterator[None]:
    """Set ONNX Runtime's log level and environment variables while a session opens, in Partita's own processes only."""
    if not process.own_process:
        yield
        return
    before = {name: os.environ.get(name) for name in opening.environment}
    ort.set_default_logger_severity(log_level(opening))
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
    """Replace weight files by their link targets: ONNX Runtime before 1.27 follows no links
    (microsoft/onnxruntime#27353)."""
    import onnx

    model = onnx.load_from_string(opening.model) if opening.model else onnx.load(path, load_external_data=False)
    places = [entry for tensor in all_tensors(model) for entry in tensor.external_data if entry.key == "location"]
    files = [(path.parent / entry.value).resolve() for entry in places]
    home = Path(os.path.commonpath([file.parent for file in files]))
    for entry, file in zip(places, files, strict=True):
        entry.value = file.relative_to(home).as_posix()
    return replace(opening, model=model.SerializeToString(), weights=home)
