"""Graph capture: the provider captures one decode step of a package and replays it.

A replay runs the same kernels on the same addresses, so all inputs are in fixed device buffers that are written before
each run. Inputs that a kernel reads in host memory keep the values of the captured run. Observed runs are not captured,
because a replay has no events to profile.

Obstacles are found before a run. ONNX Runtime refuses a session with nodes on another provider, without naming them;
other obstacles make the run fail or its output wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from partita.errors import PartitaError, ProviderError
from partita.observations.text_format import plural
from partita.package.contract import Contract, GraphFile
from partita.providers.resolve import Resolution
from partita.remedies import Remedy
from partita.runtime.chain.open_chain import opened_facts, refusal
from partita.runtime.chain.provider_state import active_of
from partita.runtime.generate.cache import Cache, moves
from partita.runtime.generate.feeds import BoundInput, cursor_writer, port_by_role
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY, Buffer
from partita.runtime.ort.native_log import INFO
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening
from partita.runtime.verify.comparison import difference, scale_of

WITHOUT = Remedy("disable graph capture, or export the checkpoint for this provider")
TOLERANCE = 1e-3
"""Relative to the largest logit."""
CONSTANT = "total_length"
"""The only cursor that a captured run may read in host memory: an upper bound of the row lengths, which
GroupQueryAttention reads on the device (`last_index`). The cache length is a valid bound, as in onnxruntime-genai
(PR 271 of its repository). Not tested on a GPU."""
MEMCPY = "Memcpy"


def recording_session(
    path: Path,
    contract: Contract,
    graph: GraphFile,
    chain: tuple[Resolution, ...],
    opened: Callable[[tuple[Resolution, ...]], Session],
) -> Session:
    """A session with graph capture for the graph of decode steps, opened by `opened`.

    Raises ProviderError when the decode steps cannot be captured, and the errors of `opened`.
    """
    recorder = next((entry for entry in chain if entry.captures), None)
    if recorder is not None and recorder.status != "active":
        raise _not_there(recorder)
    if recorder is None or graph.phase == "prefill":
        session = opened(tuple(entry.uncaptured() for entry in chain))
        options = {entry.provider.name: entry.options for entry in chain}  # for the next graph
        session.resolutions = tuple(
            replace(entry, options=options[entry.provider.name]) for entry in session.resolutions
        )
        return session
    check_contract(path, contract, graph)
    try:
        session = opened(chain)
    except PartitaError as error:
        raise _not_captured_error(path, chain, recorder, error) from error
    try:
        if not any(entry.captures and entry.status == "active" for entry in session.resolutions):
            raise _not_captured_error(path, chain, recorder, None)
        found = on_host(graph, contract, session.required_memory)
        copies = sum(name.startswith(MEMCPY) for stream in session.plan or () for name in stream)
        if copies:
            found.append(f"{plural(copies, 'copy')} between host and device within a step")
        if found:
            raise _not_captured(path, found)
    except BaseException:
        session.close()
        raise
    return session


def check_contract(path: Path, contract: Contract, graph: GraphFile) -> None:
    """Raise ProviderError when decode steps differ in more than the values of their inputs."""
    mask = port_by_role(graph, "mask")
    if contract.cacheless:
        raise _not_captured(path, ["it has no KV cache, so the input grows with every step"])
    if any(moves(state) for state in contract.states):
        raise _not_captured(path, ["its cache grows with every token, so shapes change with every step"])
    if mask is not None and not all(isinstance(size, int) for size in mask.shape[1:]):
        raise _not_captured(path, [f"its input {mask.name} grows with every step"])


def on_host(graph: GraphFile, contract: Contract, memory: Mapping[str, str]) -> list[str]:
    """Reasons why data of a decode step is in host memory. `memory`: memory by port."""
    found = []
    for port in graph.inputs:
        changes = port.role == "tokens" or (port.role != CONSTANT and cursor_writer(port.role, 1) is not None)
        if changes and memory[port.name] == HOST_MEMORY:
            found.append(f"a kernel reads {port.name} in host memory, which a replay does not update")
    states = [state for state in contract.states if memory[state.past] == HOST_MEMORY]
    if states:
        found.append(f"{plural(len(states), 'state')} of its cache in host memory")
    for port in graph.outputs:
        if memory[port.name] == HOST_MEMORY:
            found.append(f"{port.name} is computed in host memory")
        elif memory[port.name] == CUDA_MEMORY and port.dtype == "bfloat16":
            found.append(f"{port.name} is bfloat16, which ONNX Runtime cannot copy back from CUDA")
    return found


def _not_captured(path: Path, found: Sequence[str]) -> ProviderError:
    return ProviderError(f"graph capture is not possible: {'; '.join(found)}", path=path, remedy=WITHOUT)


def _not_captured_error(
    path: Path, chain: Sequence[Resolution], recorder: Resolution, error: PartitaError | None
) -> PartitaError:
    """The error for a session with graph capture that does not open; it names nodes on other providers if they are the
    cause.

    `error`: raised by the session; None if ONNX Runtime left the provider out. ONNX Runtime does not name the nodes, so
    a session without graph capture is opened for its placement.
    """
    active = active_of([entry.uncaptured() for entry in chain])
    capturing = tuple(entry for entry in active if entry.provider.ort_name == recorder.provider.ort_name)
    try:
        session = open_native(path, active, Opening(severity=INFO))
    except NativeFailureError:
        return error or _not_there(recorder)
    try:
        facts = opened_facts(path, session, capturing)
    finally:
        session.close()
    found = refusal(path, capturing, facts)
    if not found.nodes:
        return error or _not_there(recorder)
    return ProviderError(
        f"graph capture is not possible: {found.count} would not run on {recorder.provider.name}: {found.operators}",
        path=path,
        remedy=replace(WITHOUT, alternative=found.export),
        nodes=found.nodes,
    )


def _not_there(recorder: Resolution) -> ProviderError:
    """The error for a provider that ONNX Runtime does not use at all."""
    reason = f": {recorder.reason}: {recorder.evidence}" if recorder.reason else ""
    return ProviderError(f"graph capture is not possible: {recorder.provider.name} is not used{reason}", remedy=WITHOUT)


# --- captured runs ----------------------------------------------------------------------------------------------------


class Recording:
    """The device buffers of a graph and its captured run. Replaces a `Binding`."""

    def __init__(self, session: Session, binding: Binding, cache: Cache) -> None:
        self._session, self._binding = session, binding
        self._fed: list[tuple[str, Buffer, Buffer]] = []
        self._outputs: list[Buffer] = []
        self._on_host: set[int] = set()
        self._number: int | None = None
        self.replays = 0
        """Number of runs that replayed the captured run."""
        self._replay_verified = False
        self._advancing = tuple(store.buffer for store in cache.stores if not store.padding_is_safe)
        """States that take in tokens; restored because capturing runs the graph several times."""

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Bind the input `name` to device memory, to which `buffer` is copied before each run."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory == HOST_MEMORY:
            self._on_host.add(id(buffer))
            self._binding.bind_input(name, buffer)
            return
        self._binding.bind_input(name, device)
        self._fed.append((name, buffer, device))

    def bind_constant(self, name: str, buffer: Buffer) -> None:
        """Bind the input `name` to device memory, to which `buffer` is copied once."""
        device = self._session.state_buffer(name, buffer.host.shape, buffer.dtype)
        if device.memory != HOST_MEMORY:
            device.write(buffer)
        self._binding.bind_input(name, buffer if device.memory == HOST_MEMORY else device)

    def bind_output(self, name: str, device: Buffer) -> None:
        """Bind the output `name` to device memory."""
        self._binding.bind_output(name, device)
        self._outputs.append(device)

    @property
    def fed_bytes(self) -> dict[str, int]:
        """Bytes copied to the device before each run, by input."""
        return {name: buffer.size_bytes for name, buffer, _ in self._fed}

    def fix(self, inputs: Mapping[str, BoundInput], max_length: int) -> frozenset[str]:
        """Write the inputs that the host reads once; return their roles."""
        feed = inputs.get(CONSTANT)
        if feed is None or id(feed.buffer) not in self._on_host:
            return frozenset()
        feed.array.fill(max_length)
        return frozenset({CONSTANT})

    def run(self, *, observed: bool) -> None:
        """Run the graph. Raises ProviderError if a replay computes another result.

        Observed runs are not captured. Then one run is captured, and the next is both replayed and run with its new
        inputs, which shows whether the capture is incomplete.
        """
        for _, host, device in self._fed:
            device.write(host)
        if observed:
            self._binding.run()
        elif self._number is None:
            self._record()
        elif not self._replay_verified:
            self._verify_replay(self._number)
        else:
            self._binding.replay(self._number)
            self.replays += 1

    def _record(self) -> None:
        """Capture a run and run it. Keys and values are overwritten in place; other states are restored in between."""
        before = self._states()
        self._number = self._session.next_recording()
        self._binding.replay(self._number)
        self._put_back(before)
        self._binding.run()

    def _verify_replay(self, number: int) -> None:
        """Replay, then run, and compare the results."""
        before = self._states()
        for device in self._outputs:
            device.clear()
        self._binding.replay(number)
        replayed = [device.host_copy() for device in self._outputs]
        self._put_back(before)
        self._binding.run()
        for device, found in zip(self._outputs, replayed, strict=True):
            if not _results_match(device.host_copy(), found):
                raise ProviderError(
                    "graph capture is not possible: a replayed step computes a different result, so the "
                    "provider does not capture the whole graph",
                    remedy=WITHOUT,
                )
        self._replay_verified = True

    def _states(self) -> list[Buffer]:
        """Copies of the states that a run advances."""
        return [buffer.host_copy() for buffer in self._advancing]

    def _put_back(self, states: Sequence[Buffer]) -> None:
        for held, buffer in zip(states, self._advancing, strict=True):
            buffer.write(held)


def _results_match(ran: Buffer, replayed: Buffer) -> bool:
    """Whether two runs of the same kernels gave the same logits, up to the order of summation."""
    if np.array_equal(ran.host, replayed.host):
        return True
    if ran.dtype == "bfloat16":
        return False  # raw bits in numpy
    one, other = (buffer.host.astype(np.float32).reshape(-1, buffer.host.shape[-1]) for buffer in (ran, replayed))
    scale = scale_of(one)
    return all(difference(*rows, scale) <= TOLERANCE * scale for rows in zip(other, one, strict=True))
