"""Graph capture: whether a package's decode steps can be captured and replayed, checked before a run.

ONNX Runtime refuses a session with nodes on another provider, without naming them; other obstacles make the run fail or
its output wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import PartitaError, ProviderError
from partita.observations.text_format import plural
from partita.package.contract import Contract, GraphFile
from partita.providers.resolve import Resolution
from partita.runtime.chain.open_chain import opened_facts, refusal
from partita.runtime.chain.provider_state import active_of
from partita.runtime.generate.cache.growing_states import moves
from partita.runtime.generate.feeds import cursor_writer, port_by_role
from partita.runtime.generate.record.graph_capture import CONSTANT, WITHOUT
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening

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
        session = open_native(path, active, Opening(explain=True))
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
