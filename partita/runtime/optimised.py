"""The graph as ONNX Runtime runs it: fused nodes, Memcpy nodes, and the tensors between them.

ONNX Runtime writes it while it opens a session. That takes time and memory, so a second session does it, after the run,
on the same chain, options, pins and model; it is closed at once. Whether it speaks for the run is checked by its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita.files import temporary_directory
from partita.observations.facts import GraphNode, RunFacts, SessionFacts
from partita.observations.text_format import human_bytes, plural
from partita.runtime.model_file import all_nodes, bodies, graph_node, reads
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.session import NativeFailureError, Session, open_native

if TYPE_CHECKING:
    import onnx

LIMIT_BYTES = 256 << 20
"""Most weights for which a second session is opened: it holds them once more, and writes them to disk."""
FILE = "optimised.onnx"
SAID = 200
Plan = tuple[tuple[str, ...], ...]


def with_optimised(facts: RunFacts, sessions: Sequence[Session]) -> RunFacts:
    """The facts with the optimised graph of each session, or with why there is none. Never raises for a failure of it.

    `sessions`: those that the facts are about, in the same order; they may be open or closed.
    """
    pairs = zip(facts.sessions, sessions, strict=True)
    weight_bytes = facts.memory.weight_bytes
    return replace(facts, sessions=tuple(add_optimised(known, session, weight_bytes) for known, session in pairs))


def add_optimised(facts: SessionFacts, session: Session, weight_bytes: int) -> SessionFacts:
    """The facts of one session with its optimised graph, or with why there is none."""
    why = _ruled_out(session, weight_bytes)
    if why:
        return replace(facts, optimised_why=why)
    try:
        nodes, plan = read_optimised(session)
    except (NativeFailureError, OSError, MemoryError, ValueError) as error:
        said = one_line(str(error), SAID)
        return replace(facts, optimised_why=f"the second session that should have written it failed: {said}")
    why = difference(facts.plan, plan)
    return replace(facts, optimised=None if why else nodes, optimised_why=why)


def _ruled_out(session: Session, weight_bytes: int) -> str:
    """Why no second session is opened; empty when one is."""
    compiling = [entry.provider.name for entry in session.active if entry.provider.compiles]
    if compiling:
        return f"{compiling[0]} compiles subgraphs, and ONNX Runtime cannot serialise a graph with compiled nodes"
    if weight_bytes > LIMIT_BYTES:
        return (
            f"its weights of {human_bytes(weight_bytes)} are more than {human_bytes(LIMIT_BYTES)}, and a second "
            "session would load them again"
        )
    return ""


def read_optimised(session: Session) -> tuple[tuple[GraphNode, ...], Plan | None]:
    """Nodes of the graph that a session like this one runs, and that session's plan.

    Raises NativeFailureError when it cannot be opened, OSError when the file cannot be written or read, ValueError when
    it is no ONNX file.
    """
    with temporary_directory() as folder:
        path = Path(folder) / FILE
        opening = replace(session.opening, observe=False, optimised=path)
        with closing(open_native(session.path, session.active, opening)) as second:
            return _read_nodes(path), second.plan


def _read_nodes(path: Path) -> tuple[GraphNode, ...]:
    """Nodes of the main graph in the file `path`, and those in their bodies; its weights are not read.

    A node with a body also reads what the body takes from around it. Raises OSError, and ValueError for a damaged file.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except DecodeError as error:
        raise ValueError(f"the file that it wrote is not an ONNX file ({error})") from error
    return tuple(replace(with_captured(graph_node(node), node), inside=_inside(node)) for node in graph.node)


def _inside(node: onnx.NodeProto) -> tuple[GraphNode, ...]:
    """Nodes in the bodies of a node, however deep."""
    return tuple(graph_node(inner) for body in bodies(node) for inner in all_nodes(body))


def with_captured(known: GraphNode, node: onnx.NodeProto) -> GraphNode:
    """The node with what its bodies read from around them among its inputs."""
    captured = dict.fromkeys(name for name in reads(node) if name not in known.inputs)
    return replace(known, inputs=(*known.inputs, *captured)) if captured else known


def difference(ran: Plan | None, wrote: Plan | None) -> str:
    """How the plan of the session that wrote the graph differs from the run's; empty when both have the same nodes.

    Nodes that ONNX Runtime makes are numbered per graph, so their names are the same in every session (seen with the
    Memcpy and Transpose nodes of CPU, CUDA and WebGPU); only compiled nodes are numbered per process.
    """
    if ran is None or wrote is None:
        return "ONNX Runtime wrote no plan, so nothing shows that a second session's graph matches the run"
    ours, theirs = (Counter(name for stream in plan for name in stream) for plan in (ran, wrote))
    if ours == theirs:
        return ""
    only_ours, only_theirs = (ours - theirs).total(), (theirs - ours).total()
    return (
        f"the second session placed the graph differently, so it is not used: {plural(only_ours, 'node')} only in the "
        f"plan of the run, {only_theirs} only in its own"
    )
