"""The optimised graph of a session: fused nodes, Memcpy nodes, and the tensors between them.

ONNX Runtime writes it while it opens a session. A second session with the same chain, options, pins and model does so
after the run. Its graph counts only if its plan is that of the run.
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
"""Largest weights for a second session, which loads them again and writes them to disk."""
MESSAGE_LENGTH = 200
Plan = tuple[tuple[str, ...], ...]


def with_optimised(facts: RunFacts, sessions: Sequence[Session]) -> RunFacts:
    """The facts with the optimised graph of each session, or with the reason for none.

    `sessions`: in the order of the facts; they may be open or closed.
    """
    pairs = zip(facts.sessions, sessions, strict=True)
    weight_bytes = facts.memory.weight_bytes
    return replace(facts, sessions=tuple(add_optimised(known, session, weight_bytes) for known, session in pairs))


def add_optimised(facts: SessionFacts, session: Session, weight_bytes: int) -> SessionFacts:
    """The facts of one session with its optimised graph, or with the reason for none."""
    compiling = [entry.provider.name for entry in session.active if entry.provider.compiles]
    why = ""
    if compiling:
        why = f"{compiling[0]} compiles subgraphs, and ONNX Runtime cannot serialise a graph with compiled nodes"
    elif weight_bytes > LIMIT_BYTES:
        why = f"its weights of {human_bytes(weight_bytes)} are more than {human_bytes(LIMIT_BYTES)}, and a second "
        why += "session would load them again"
    if why:
        return replace(facts, optimised_why=why)
    try:
        nodes, plan = read_optimised(session)
    except (NativeFailureError, OSError, MemoryError, ValueError) as error:
        message = one_line(str(error), MESSAGE_LENGTH)
        return replace(facts, optimised_why=f"the second session that should have written it failed: {message}")
    why = difference(facts.plan, plan)
    return replace(facts, optimised=None if why else nodes, optimised_why=why)


def read_optimised(session: Session) -> tuple[tuple[GraphNode, ...], Plan | None]:
    """Nodes of the optimised graph of a second session, and its plan.

    Raises NativeFailureError when it cannot be opened, OSError when the file cannot be written or read, ValueError for
    a damaged file.
    """
    with temporary_directory() as folder:
        path = Path(folder) / "optimised.onnx"
        opening = replace(session.opening, observe=False, optimised=path)
        with closing(open_native(session.path, session.active, opening)) as second:
            return _read_nodes(path), second.plan


def _read_nodes(path: Path) -> tuple[GraphNode, ...]:
    """Nodes of the file `path`, with those of their subgraphs inside. Raises OSError, and ValueError for damage."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except DecodeError as error:
        raise ValueError(f"the file that it wrote is not an ONNX file ({error})") from error
    return tuple(
        replace(
            with_captured(graph_node(node), node),
            inside=tuple(graph_node(inner) for body in bodies(node) for inner in all_nodes(body)),
        )
        for node in graph.node
    )


def with_captured(known: GraphNode, node: onnx.NodeProto) -> GraphNode:
    """The node with the outer tensors that its subgraphs read among its inputs."""
    captured = dict.fromkeys(name for name in reads(node) if name not in known.inputs)
    return replace(known, inputs=(*known.inputs, *captured)) if captured else known


def difference(ran: Plan | None, wrote: Plan | None) -> str:
    """How the plan of the session that wrote the graph differs from the run's; empty when both have the same nodes.

    ONNX Runtime numbers the nodes that it adds per graph, so their names are the same in every session.
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
