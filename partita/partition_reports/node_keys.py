"""What a node is known by in every report of its model: the names that the ONNX file has, never those of a process.

Names that ONNX Runtime makes carry counters (`Memcpy_token_4`, `OpenVINO-EP-subgraph_3_0`), so two runs of one model
have other names for the same thing. A compiled or fused node is known by the nodes of the file that it does the work
of, and what ONNX Runtime adds by its operator, the shape of its name and its provider. Memcpy nodes have no key: they
are copies, and known by what they copy.
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
"""The position of a node in a body, which is in no plan."""


def stands_for(node: NodePlacement) -> tuple[str, ...]:
    """Nodes of the file whose work a node of the plan does: itself, those it took the place of, or both."""
    own = (node.name,) if "model_file" in node.sources or not node.replaces else ()
    return (*own, *node.replaces)


@dataclass(frozen=True, slots=True)
class Part:
    """A node of the file whose work a node of the plan does, or that node itself."""

    op_type: str | None
    module: str | None


def parts_of(node: NodePlacement) -> tuple[Part, ...]:
    """What `stands_for` names, each with its operator and its module; None where it has none, `unknown` where the
    report does not say. The module of a report that was written without is that in the name.
    """
    names, operators, modules = node.replaces, node.replaces_op_types, node.replaces_modules
    if len(operators) != len(names):
        operators = (UNKNOWN,) * len(names)
    if len(modules) != len(names):
        modules = tuple(naming.module_in(name) or UNKNOWN for name in names)
    own = (Part(node.op_type, node.module),) if len(stands_for(node)) > len(names) else ()
    return (*own, *map(Part, operators, modules))


def is_added(node: NodePlacement) -> bool:
    """Whether it is ONNX Runtime's own: the file does not have it, nor what it stands for."""
    return "model_file" not in node.sources and not node.replaces


def inlined_parts(phase: Phase) -> tuple[NodePlacement, ...]:
    """Nodes in bodies of functions that ONNX Runtime unfolded: parts of nodes of the file like those of the plan."""
    unknown = dict.fromkeys(("layer", "host_us_per_run", "output_bytes"))
    return tuple(
        NodePlacement.taken_from(part, position=INSIDE, sources=("assignment",), **unknown)
        for part in (phase.bodies.parts if phase.bodies else ())
    )


def keyed(nodes: Sequence[NodePlacement]) -> tuple[NodePlacement, ...]:
    """The nodes of a phase with their keys, one for each that `stands_for` names; as they are where they have some.

    A report that was written without keys is given them when it is read, by the same rule.
    """
    if any(node.keys for node in nodes):
        return tuple(nodes)
    seen: Counter[str] = Counter()
    return tuple(
        node if is_memcpy(node) else node.model_copy(update={"keys": tuple(_make_keys(node, seen))}) for node in nodes
    )


def _make_keys(node: NodePlacement, seen: Counter[str]) -> list[str]:
    """The keys of one node. `seen`: how often each was given before in its phase; a second one has a number."""
    keys, added = [], is_added(node)
    for name in stands_for(node):
        # What ONNX Runtime adds has no identity of its own; those that stayed on their provider are matched first.
        key = f"{node.op_type} {DIGITS.sub('#', name)} {node.provider}" if added else name
        seen[key] += 1
        keys.append(f"{key} {seen[key]}" if added or seen[key] > 1 else key)
    return keys
