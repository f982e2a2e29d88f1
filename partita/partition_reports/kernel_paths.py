"""The kernel paths of a phase as records, with the cost of their nodes. Pure."""

from __future__ import annotations

from partita.diagnosis.actions import checkpoint_of, same_precision
from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.records import KernelPath
from partita.diagnosis.session_index import SessionIndex
from partita.observations.records import PackageFacts
from partita.partition_reports.groups import share_of, total_us
from partita.partition_reports.records import Phase


def kernel_paths(index: SessionIndex, phase: Phase, package: PackageFacts | None) -> tuple[KernelPath, ...]:
    """The kernel of each executed node whose operator has several on its provider, in execution order."""
    blanks: dict[str, object] = {
        "checkpoint": checkpoint_of(package),
        "out": "OUT" if package is None else f"{package.name}-fast",
        "same_precision": same_precision(package),
    }
    nodes, whole = {node.name: node for node in phase.nodes}, total_us(phase.nodes)
    found = []
    for each in find_paths(index, phase.name):
        node, row = nodes[each.node], each.row
        found.append(
            KernelPath(
                phase=phase.name,
                node=node.name,
                op_type=node.op_type,
                provider=each.provider,
                path=each.path,
                is_slow=row is not None and bool(row.cause),
                evidence_kind=each.evidence_kind,
                evidence=each.evidence,
                cause=row.cause if row is not None else "",
                remedy=str(row.remedy.filled(**blanks)) if row is not None and row.remedy is not None else "",
                module=node.module,
                host_us_per_run=node.host_us_per_run,
                time_share=share_of(node.host_us_per_run, whole),
            )
        )
    return tuple(found)
