"""Graph capture: whether a package's decode steps can be captured and replayed, checked before a run.

ONNX Runtime refuses a session with nodes on another provider, without naming them; other obstacles make the run fail or
its output wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from partita.diagnosis.explanation import refused_nodes
from partita.errors import PartitaError, ProviderError
from partita.observations.text_format import listing, plural
from partita.package.contract import Contract, GraphFile
from partita.providers.resolve import Resolution
from partita.runtime.chain.advice import export_again_for, rows_of
from partita.runtime.chain.open_chain import chain_entry, opened_facts
from partita.runtime.chain.provider_state import active_of, ort_names
from partita.runtime.generate.cache.growing_states import moves
from partita.runtime.generate.feeds import cursor_writer, port_by_role
from partita.runtime.generate.record.graph_capture import CONSTANT, WITHOUT
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY
from partita.runtime.ort.session import NativeFailureError, Opening, Session, open_native

MEMCPY = "Memcpy"
MOST_NAMED = 5


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
    recorder = recorder_of(chain)
    if recorder is not None and recorder.status != "active":
        raise _not_there(recorder)
    if recorder is None or graph.phase == "prefill":
        session = opened(without_recording(chain))
        session.resolutions = resettled(session.resolutions, chain)
        return session
    check_contract(path, contract, graph)
    try:
        session = opened(chain)
    except PartitaError as error:
        raise not_captured_error(path, chain, error) from error
    try:
        kept = recorder_of(session.resolutions)
        if kept is None or kept.status != "active":
            raise not_captured_error(path, chain, None)
        check_session(path, graph, contract, session)
    except BaseException:
        session.close()
        raise
    return session


def check_contract(path: Path, contract: Contract, graph: GraphFile) -> None:
    """Raise ProviderError when decode steps differ in more than the values of their inputs."""
    mask = port_by_role(graph, "mask")
    if contract.rereads:
        raise _not_captured(path, ["it has no KV cache, so the input grows with every step"])
    if any(moves(state) for state in contract.states):
        raise _not_captured(path, ["its cache grows with every token, so shapes change with every step"])
    if mask is not None and not all(isinstance(size, int) for size in mask.shape[1:]):
        raise _not_captured(path, [f"its input {mask.name} grows with every step"])


def check_session(path: Path, graph: GraphFile, contract: Contract, session: Session) -> None:
    """Raise ProviderError when a decode step has data in host memory or copies."""
    found = on_host(graph, contract, session.required_memory)
    copies = sum(name.startswith(MEMCPY) for stream in session.plan or () for name in stream)
    if copies:
        found.append(f"{plural(copies, 'copy')} between host and device within a step")
    if found:
        raise _not_captured(path, found)


def on_host(graph: GraphFile, contract: Contract, memory: Mapping[str, str]) -> list[str]:
    """Reasons why data of a decode step is in host memory. `memory`: memory by port."""
    ports = [port for port in graph.inputs if memory[port.name] == HOST_MEMORY and _changes(port.role)]
    found = [f"a kernel reads {port.name} in host memory, which a replay does not update" for port in ports]
    states = [state for state in contract.states if memory[state.past] == HOST_MEMORY]
    if states:
        found.append(f"{plural(len(states), 'state')} of its cache in host memory")
    for port in graph.outputs:
        if memory[port.name] == HOST_MEMORY:
            found.append(f"{port.name} is computed in host memory")
        elif memory[port.name] == CUDA_MEMORY and port.dtype == "bfloat16":
            found.append(f"{port.name} is bfloat16, which ONNX Runtime cannot copy back from CUDA")
    return found


def _changes(role: str) -> bool:
    """Whether an input differs between steps."""
    return role == "tokens" or (role != CONSTANT and cursor_writer(role, 1) is not None)


def _not_captured(path: Path, found: Sequence[str]) -> ProviderError:
    return ProviderError(f"graph capture is not possible: {'; '.join(found)}", path=path, remedy=WITHOUT)


def recorder_of(chain: Sequence[Resolution]) -> Resolution | None:
    """The provider of the chain with graph capture enabled; None without one."""
    return next((entry for entry in chain if entry.captures), None)


def resettled(settled: Sequence[Resolution], chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The settled state of each provider, with the options of the chain, for the next graph."""
    options = {entry.provider.name: entry.options for entry in chain}
    return tuple(replace(entry, options=options[entry.provider.name]) for entry in settled)


def without_recording(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The chain without graph capture, for graphs that run no decode steps."""
    return tuple(entry.uncaptured() for entry in chain)


def not_captured_error(path: Path, chain: Sequence[Resolution], error: PartitaError | None) -> PartitaError:
    """The error for a session with graph capture that does not open; it names nodes on other providers if they are the
    cause.

    `error`: raised by the session; None if ONNX Runtime left the provider out. ONNX Runtime does not name the nodes, so
    a session without graph capture is opened for its placement.
    """
    recorder = recorder_of(chain)
    assert recorder is not None
    active = active_of(without_recording(chain))
    requested = tuple(entry for entry in active if entry.provider.ort_name == recorder.provider.ort_name)
    try:
        session = open_native(path, active, Opening(explain=True))
    except NativeFailureError:
        return error or _not_there(recorder)
    try:
        facts = opened_facts(path, session, requested)
    finally:
        session.close()
    rows = refused_nodes(facts, tuple(chain_entry(entry) for entry in requested))
    nodes = rows_of(rows, ort_names(requested))
    if not nodes:
        return error or _not_there(recorder)
    counted = Counter(row.op_type or "?" for row in rows).most_common()
    shown = listing([f"{op} ({count})" for op, count in counted[:MOST_NAMED]])
    message = (
        f"graph capture is not possible: {plural(len(rows), 'node')} would not run on {recorder.provider.name}: {shown}"
    )
    return ProviderError(
        message, path=path, remedy=replace(WITHOUT, alternative=export_again_for(path, nodes)), nodes=nodes
    )


def _not_there(recorder: Resolution) -> ProviderError:
    """The error for a provider that ONNX Runtime does not use at all."""
    reason = f": {recorder.reason}: {recorder.evidence}" if recorder.reason else ""
    return ProviderError(f"graph capture is not possible: {recorder.provider.name} is not used{reason}", remedy=WITHOUT)
