"""Nodes in the bodies of If, Loop and Scan: the plan and the report's node list hold the main graph only. Pure.

ONNX Runtime's assignment list has them without saying so, and its log has the copies that it inserts into them.
"""

from __future__ import annotations

from partita.diagnosis import native_log
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import AssignedNode
from partita.observations.names import CPU
from partita.partition_reports.records import Bodies, BodyNode


def find_bodies(index: SessionIndex) -> Bodies | None:
    """What is in bodies and not in the main graph; None when there is no control flow."""
    listed = index.in_bodies()
    if listed is None:
        return None
    inserted = {line for line in index.facts.log if native_log.MEMCPY_ADDED.search(line)}
    in_plan = len(native_log.inserted_copies(index.order, {name: index.op_type(name) for name in index.order}))
    logged = native_log.is_at_info(index.facts.log)
    nodes = [_body_node(index, node) for node in listed]
    on_cpu = tuple(node for node in nodes if node.provider == CPU)
    return Bodies(
        nodes=len(listed),
        cpu_nodes=tuple(f"{node.name} ({node.op_type})" for node in on_cpu),
        on_cpu=on_cpu,
        parts=tuple(node for node in nodes if any(each in index.exported for each in node.replaces)),
        copies=max(len(inserted) - in_plan, 0) if logged else None,
    )


def _body_node(index: SessionIndex, node: AssignedNode) -> BodyNode:
    """A listed node, with what it is a part of."""
    replaces = (index.replaces(node.name) or index.within.get(node.name, ())) if node.name else ()
    return BodyNode(
        name=node.name,
        op_type=node.op_type,
        provider=node.provider,
        module=index.module(node.name) if node.name else None,
        replaces=replaces,
        replaces_op_types=tuple(index.exported_op(each) for each in replaces),
    )
