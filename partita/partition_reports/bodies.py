"""Nodes in the bodies of If, Loop and Scan: the plan and the report's node list hold the main graph only. Pure.

ONNX Runtime's assignment list has them without saying so, and its log has the copies that it inserts into them.
"""

from __future__ import annotations

from partita.diagnosis import native_log
from partita.diagnosis.session_index import CONTROL_FLOW, SessionIndex
from partita.observations.names import CPU
from partita.partition_reports.records import Bodies, BodyNode


def find_bodies(index: SessionIndex) -> Bodies | None:
    """What is in bodies and not in the main graph; None when the file has no control flow.

    A listed node counts when neither the file's main graph nor the plan has its name, and no compiled subgraph has it.
    """
    if not any(node.op_type in CONTROL_FLOW for node in index.exported.values()):
        return None
    main = set(index.exported) | set(index.order)
    main |= {node.name for inside in index.compiled.values() for node in inside}
    listed = [node for node in index.facts.assigned or () if node.name not in main]
    inserted = {line for line in index.facts.log if native_log.MEMCPY_ADDED.search(line)}
    in_plan = len(native_log.inserted_copies(index.order, {name: index.op_type(name) for name in index.order}))
    logged = native_log.is_at_info(index.facts.log)
    on_cpu = tuple(BodyNode(name=node.name, op_type=node.op_type) for node in listed if node.provider == CPU)
    return Bodies(
        nodes=len(listed),
        cpu_nodes=tuple(f"{node.name} ({node.op_type})" for node in on_cpu),
        on_cpu=on_cpu,
        copies=max(len(inserted) - in_plan, 0) if logged else None,
    )
