"""Copies between devices: Memcpy nodes, and graph inputs and outputs bound in other memory."""

from __future__ import annotations

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import PortFact
from partita.observations.records import PhaseName
from partita.partition_reports.causes import Cause, find_causes
from partita.partition_reports.partitions import port_bytes
from partita.partition_reports.records import Copy, NodePlacement, Phase

MEMCPY = {"MemcpyFromHost": "host_to_device", "MemcpyToHost": "device_to_host"}


def is_memcpy(node: NodePlacement) -> bool:
    """Whether ONNX Runtime inserted the node as a copy; without a profile by its name."""
    if node.op_type is None:
        return node.name == "Memcpy" or node.name.startswith("Memcpy_token_")
    return node.op_type in MEMCPY


def subgraph_copies(phase: Phase) -> int | None:
    """Copies in control-flow subgraphs in one run; None if there may be more than the sources show."""
    if phase.subgraphs is None:
        return 0
    return None if phase.subgraphs.may_have_more_copies else phase.subgraphs.copies


def find_copies(index: SessionIndex, phase: PhaseName, nodes: tuple[NodePlacement, ...]) -> tuple[Copy, ...]:
    """Every copy between devices in one run of `phase`."""
    memcpy = [node for node in nodes if is_memcpy(node)]
    causes = find_causes(index, [node.name for node in memcpy])
    inside = tuple(_memcpy_copy(index, node, causes[node.name]) for node in memcpy)
    return (*inside, *(_port_copy(port, phase) for port in index.facts.ports if _is_copied(port)))


def _is_copied(port: PortFact) -> bool:
    """Whether ONNX Runtime copies the buffer bound to a graph input or output.

    An output in another host memory is not copied, but an input is, when it is bound (measured with the OpenVINO plugin
    for ONNX Runtime 1.31 and its memory OpenVINO_shared_CPU).
    """
    if port.required_memory == port.bound_memory:
        return False
    return port.direction == "input" or not (_is_host(port.required_memory) and _is_host(port.bound_memory))


def _memcpy_copy(index: SessionIndex, node: NodePlacement, cause: Cause) -> Copy:
    """The copy of a Memcpy node."""
    logged = index.memcpy.get(node.name)
    return Copy.model_validate(
        {
            "kind": "memcpy_node",
            "direction": MEMCPY.get(node.op_type or "", "unknown"),
            "name": node.name,
            "tensor": logged.tensor if logged else None,
            "bytes_per_run": node.output_bytes,
            "host_us_per_run": node.host_us_per_run,
            "caused_by": cause.nodes,
            "cause_missing_reason": cause.unknown_reason,
            "source": "profile" if "profile" in node.sources else "plan_file",
        }
    )


def _port_copy(port: PortFact, phase: PhaseName) -> Copy:
    """The copy outside the graph for a buffer in other memory than the graph expects."""
    is_input = port.direction == "input"
    origin, target = (port.bound_memory, port.required_memory)[:: 1 if is_input else -1]
    return Copy.model_validate(
        {
            "kind": "session_input" if is_input else "session_output",
            "direction": _direction(origin, target),
            "name": port.name,
            "bytes_per_run": port_bytes(port, phase),
            "host_us_per_run": None,
            "source": "memory_info",
        }
    )


def _direction(origin: str, target: str) -> str:
    """Direction of a copy between two memories, by their names."""
    return "_to_".join("host" if _is_host(memory) else "device" for memory in (origin, target))


def _is_host(memory: str) -> bool:
    """Whether it is host memory: Cpu, pinned (CudaPinned) or shared memory (OpenVINO_shared_CPU)."""
    return memory.lower() == "cpu" or memory.lower().endswith(("pinned", "_cpu"))
