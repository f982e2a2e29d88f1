"""Keys that identify a node in every report of its model.

Names from ONNX Runtime contain counters (`Memcpy_token_4`, `OpenVINO-EP-subgraph_3_0`) that differ between runs. The
keys of a compiled or fused node are its file nodes; the key of an added node is its operator, name without numbers, and
provider. Memcpy nodes have no key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.diagnosis import naming
from partita.observations.names import UNKNOWN
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.records import NodePlacement, Phase

DIGITS = re.compile(r"\d+")
INSIDE = -1
"""Position of a node in a control-flow subgraph, which is not in the plan."""


def stands_for(node: NodePlacement) -> tuple[str, ...]:
    """File nodes that a plan node executes: itself, the nodes that it replaces, or both."""
    own = (node.name,) if "model_file" in node.sources or not node.replaces else ()
    return (*own, *node.replaces)


@dataclass(frozen=True, slots=True)
class Part:
    """A file node that a plan node executes."""

    op_type: str | None
    module: str | None


def parts_of(node: NodePlacement) -> tuple[Part, ...]:
    """The nodes of `stands_for` with operator and module: None for none, `unknown` if the report lacks them. In older
    reports the module comes from the name.
    """
    names, operators, modules = node.replaces, node.replaces_op_types, node.replaces_modules
    if len(operators) != len(names):
        operators = (UNKNOWN,) * len(names)
    if len(modules) != len(names):
        modules = tuple(naming.module_in(name) or UNKNOWN for name in names)
    own = (Part(node.op_type, node.module),) if len(stands_for(node)) > len(names) else ()
    return (*own, *map(Part, operators, modules))


def is_added(node: NodePlacement) -> bool:
    """Whether ONNX Runtime added the node: neither it nor its parts are in the file."""
    return "model_file" not in node.sources and not node.replaces


def inlined_parts(phase: Phase) -> tuple[NodePlacement, ...]:
    """Nodes in control-flow subgraphs of functions that ONNX Runtime inlined; they are parts of file nodes."""
    unknown = dict.fromkeys(("layer", "host_us_per_run", "output_bytes"))
    return tuple(
        NodePlacement.taken_from(part, position=INSIDE, sources=("assignment",), **unknown)
        for part in (phase.bodies.parts if phase.bodies else ())
    )


def keyed(nodes: Sequence[NodePlacement]) -> tuple[NodePlacement, ...]:
    """The nodes of a phase with keys, one for each node of `stands_for`; unchanged if they have keys.

    Older reports without keys get them when they are read.
    """
    if any(node.keys for node in nodes):
        return tuple(nodes)
    seen: Counter[str] = Counter()
    return tuple(
        node if is_memcpy(node) else node.model_copy(update={"keys": tuple(_make_keys(node, seen))}) for node in nodes
    )


def _make_keys(node: NodePlacement, seen: Counter[str]) -> list[str]:
    """The keys of one node. `seen`: count of each key in the phase; repeated keys get a number."""
    keys, added = [], is_added(node)
    for name in stands_for(node):
        # Added nodes on the same provider are matched first.
        key = f"{node.op_type} {DIGITS.sub('#', name)} {node.provider}" if added else name
        seen[key] += 1
        keys.append(f"{key} {seen[key]}" if added or seen[key] > 1 else key)
    return keys
