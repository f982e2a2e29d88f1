"""Facts of a runner's last generation for the report, with the optimised graph of each session.

ONNX Runtime writes the optimised graph while an observed session opens, without weights. It cannot write compiled
nodes: if the chain has a compiling provider and it got no node, a second session writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from partita.observations.facts import GraphNode, PortFact, RunFacts, RunWindow, SessionFacts
from partita.observations.text_format import human_bytes, plural
from partita.process import free_bytes, peak_rss_bytes
from partita.runtime.generate.bound_graph import BoundGraph, LoadedGraph
from partita.runtime.generate.record import Step, first_token_seconds, session_facts
from partita.runtime.generate.request import Finish
from partita.runtime.generate.runner import Runner
from partita.runtime.ort.buffers import HOST_MEMORY
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.native_log import unread_profile
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.place.model_file import all_nodes, graph_node, graph_nodes, subgraphs_of, tensors_read

if TYPE_CHECKING:
    import onnx


def run_facts(runner: Runner, notes: Sequence[str] = ()) -> RunFacts:
    """Facts of the last generation of `runner`, however it ended. Ends profiling if it is still on."""
    recorder, memory = runner.recorder, runner.memory
    steps = recorder.steps
    sessions = tuple(_graph_facts(runner, entry) for entry in runner.graphs)
    seen = tuple(window for session in sessions for window in session.runs)
    cache_bytes = sum(buffer.size_bytes for buffer in runner.cache.buffers)
    peak = max(peak_rss_bytes(), memory.rss_before_load_bytes or 0, memory.rss_after_load_bytes or 0)
    return RunFacts(
        sessions=sessions,
        states=tuple(store.fact() for store in runner.cache.stores),
        steps=tuple(step.fact for step in steps),
        memory=memory.model_copy(update={"cache_bytes": cache_bytes, "peak_rss_bytes": peak}),
        tokenizer_load_seconds=0.0,
        first_token_seconds=first_token_seconds(steps),
        prompt_tokens=recorder.prompt_tokens,
        new_tokens=recorder.new_tokens if recorder.takes_turns else _new_tokens(steps),
        finish_reason=_finished(steps),
        notes=(
            *notes,
            *(note for entry in runner.graphs for note in entry.session.notes),
            *_measurement_notes(runner, seen),
            *unread_profile(sum(step.observed for step in steps), seen),
        ),
    )


def _measurement_notes(runner: Runner, seen: Sequence[RunWindow]) -> Iterator[str]:
    """Notes on requests that take turns, profiled runs of an earlier generation, selection on the device, and graph
    capture."""
    recorder = runner.recorder
    if recorder.takes_turns:
        turns = f"{plural(recorder.requests, 'request')} shared the rows of the batch"
        yield f"{turns}; prompt tokens and new tokens are totals"
    if recorder.forgotten:
        known, every = len(recorder.steps), len(recorder.steps) + recorder.forgotten
        yield f"times and speed cover {known:,} of {every:,} steps: the last steps and the profiled steps"
    phases = sorted({window.phase for window in seen if window.earlier}, reverse=True)
    if phases:
        yield (
            f"the profiled runs of {' and '.join(phases)} are of an earlier generation, because a loaded "
            "model is profiled once: node times, copies and bytes are from those runs, and steps, tokens and "
            "speed from the last generation"
        )
    choice = runner.choice
    if choice is not None and choice.failure is not None:
        yield f"tokens are selected on the host again, because the device failed: {choice.failure}"
    elif choice is not None and choice.is_used:
        yield (
            f"tokens are selected on the device (TopK, ReduceSum) in {choice.seconds * 1e3:.3f} ms per step; a copy of "
            f"all logits and a selection on the host take {choice.copy_seconds * 1e3:.3f} ms; samplers that need all "
            "logits copy them"
        )
    if runner.replays is not None:
        replayed = plural(runner.replays, "decode step")
        yield f"graph capture: {replayed} replayed a captured run; profiled steps did not"


def _graph_facts(runner: Runner, entry: LoadedGraph) -> SessionFacts:
    session = entry.session
    events, runs = entry.window.events()
    return session_facts(
        session,
        session.resolutions,
        graph=entry.model.nodes,
        subgraph_nodes=entry.model.subgraph_nodes,
        file=entry.graph.file,
        phases=entry.phases,
        ports=_port_facts(entry, runner.last_bound(entry.phases[-1]), session.required_memory),
        events=events,
        runs=runs,
    )


def _port_facts(entry: LoadedGraph, feed: BoundGraph, wanted: dict[str, str]) -> tuple[PortFact, ...]:
    """Required and bound memory of each input and output; sizes are those of one run of `feed`."""
    roles = {port.name: str(port.role) for port in (*entry.graph.inputs, *entry.graph.outputs)}
    outputs, crossing = frozenset(entry.model.outputs), feed.crossing
    of_adapters = {port.name for port in entry.graph.adapter_inputs}
    return tuple(
        PortFact(
            name=name,
            direction="output" if name in outputs else "input",
            role=roles.get(name, "state"),
            required_memory=wanted[name],
            bound_memory=HOST_MEMORY if name in crossing else buffer.memory,
            bytes_per_decode_step=crossing.get(name, buffer.size_bytes),
        )
        for name, buffer in feed.binding.buffers.items()
        # Adapter inputs are copied to the device when bound, not in a run.
        if name in wanted and name not in of_adapters
    )


def _new_tokens(steps: Sequence[Step]) -> int:
    """New tokens of the row with the most."""
    rows = zip(*(step.tokens for step in steps), strict=True)
    return max((sum(map(len, row)) for row in rows), default=0)


def _finished(steps: Sequence[Step]) -> str:
    """Finish reason of a generation: `interrupted` unless every row has finished; otherwise the most severe."""
    reasons: tuple[Finish | None, ...] = steps[-1].finish if steps else (None,)
    if None in reasons:
        return "interrupted"
    return next(reason for reason in ("error", "cache_full", "length", "stop") if reason in reasons)


MESSAGE_LENGTH = 200


def can_load_again(weight_bytes: int) -> bool:
    """Whether there is free memory for another session, with weights as float32 and packed: four times their size."""
    return 4 * weight_bytes <= free_bytes()


def with_optimised(facts: RunFacts, sessions: Sequence[Session]) -> RunFacts:
    """The facts with the optimised graph of each session, or with the reason why it is missing.

    `sessions`: in the order of the facts; open or closed.
    """
    pairs = zip(facts.sessions, sessions, strict=True)
    weight_bytes = facts.memory.weight_bytes
    return replace(facts, sessions=tuple(add_optimised(known, session, weight_bytes) for known, session in pairs))


def add_optimised(facts: SessionFacts, session: Session, weight_bytes: int) -> SessionFacts:
    """The facts of one session with its optimised graph, or with the reason why it is missing."""
    placed = None if facts.assigned is None else {node.provider for node in facts.assigned}
    for entry in session.active:
        if entry.provider.compiles and (placed is None or entry.provider.ort_name in placed):
            reason = f"{entry.provider.name} compiles subgraphs, and ONNX Runtime cannot serialise compiled nodes"
            return replace(facts, optimised_missing_reason=reason)
    if session.optimised is None and not can_load_again(weight_bytes):
        reason = f"too little free memory for a second session with weights of {human_bytes(weight_bytes)}"
        return replace(facts, optimised_missing_reason=reason)
    try:
        return replace(facts, optimised=_read_nodes(session.optimised or _saved(session)))
    except (NativeFailureError, OSError, MemoryError, ValueError) as error:
        message = one_line(str(error), MESSAGE_LENGTH)
        return replace(facts, optimised_missing_reason=f"ONNX Runtime could not write it: {message}")


def _saved(session: Session) -> bytes:
    """The optimised graph of a second session like the first. Raises NativeFailureError, OSError, ValueError."""
    config = {**session.opening.config, "session.disable_prepacking": "1"}
    opening = replace(session.opening, observe=False, saves_graph=True, config=config)
    with closing(open_native(session.path, session.active, opening)) as second:
        ran, wrote = (Counter(name for stream in each.plan or () for name in stream) for each in (session, second))
        if ran != wrote:
            raise ValueError("the second session, which writes it, has another plan")
        assert second.optimised is not None
        return second.optimised


def _read_nodes(content: bytes) -> tuple[GraphNode, ...]:
    """Nodes of an ONNX file, including those in subgraphs. Raises ValueError for a damaged file."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load_from_string(content).graph
    except DecodeError as error:
        raise ValueError(f"the optimised graph is not a valid ONNX file ({error})") from error
    return tuple(
        replace(
            with_captured(known, node),
            subgraph_nodes=tuple(graph_node(inner) for body in subgraphs_of(node) for inner in all_nodes(body)),
        )
        for known, node in zip(graph_nodes(graph), graph.node, strict=True)
    )


def with_captured(known: GraphNode, node: onnx.NodeProto) -> GraphNode:
    """The node with outer tensors that its subgraphs read added to its inputs."""
    captured = dict.fromkeys(name for name in tensors_read(node) if name not in known.inputs)
    return replace(known, inputs=(*known.inputs, *captured)) if captured else known
