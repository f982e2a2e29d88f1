"""How a graph makes the next value of what it caches, followed from the output back to the input. Pure.

Behind        past with the new rows appended: Concat, attention that does so, GroupQueryAttention's present
At a cursor   past with rows replaced at a place that the step is told: Scatter, TensorScatter, Where
Moved         a part of what was appended: the oldest rows are dropped, and every row is in another place than before

A cache of fixed length means what the runtime takes it for only when its rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from partita.foreign.facts import GraphFacts, NodeFact

Way = Literal["behind", "cursor", "moved", "unknown"]
CONTRIB, GQA = "com.microsoft", "GroupQueryAttention"
HANDED_ON = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that leave every row of what they read in its place among the others."""
PLACED = {"ScatterND": (0, 1), "ScatterElements": (0, 1), "Scatter": (0, 1), "TensorScatter": (0, 2)}
"""Operators that replace rows: which input they replace them in, and which says where."""
WRITTEN_ALONG = {"ScatterElements": 0, "Scatter": 0, "TensorScatter": -2}
"""Operators that replace rows along an axis, and the one that they take without being told."""
CUT = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Split"})
CACHED_BY = {
    (CONTRIB, GQA): {3: 1, 4: 2},
    (CONTRIB, "SparseAttention"): {3: 1, 4: 2},
    (CONTRIB, "MultiHeadAttention"): {6: 1, 7: 2},
    (CONTRIB, "DecoderMaskedMultiHeadAttention"): {5: 1, 6: 2},
    ("", "Attention"): {4: 1, 5: 2},
}
"""Attention that keeps a cache itself: its inputs for past keys and values, and the outputs that continue them."""
AT_LENGTH = frozenset({GQA, "SparseAttention", "DecoderMaskedMultiHeadAttention"})
"""Of these, those that write the new rows behind the valid ones of a buffer that is longer."""


def attention_places(node: NodeFact) -> dict[int, int]:
    """Inputs for past and the outputs that continue them; empty for a node that keeps no cache."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return CACHED_BY.get((domain, node.op_type), {})


def carried(graph: GraphFacts, present: str, cursors: frozenset[str] | None = None) -> tuple[str | None, Way]:
    """The input that an output continues, and how; None where that cannot be told.

    `cursors`: inputs that say where the new rows are; None: not asked for.
    """
    output = graph.output(present)
    pasts = {port.name for port in graph.inputs if output is not None and port.dtype == output.dtype}
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    way: Way | None = None
    tensor, seen = present, set[str]()
    while tensor not in pasts:
        node = producers.get(tensor)
        if node is None or tensor in seen:
            return None, "unknown"
        seen.add(tensor)
        places = attention_places(node)
        if places:
            made = node.outputs.index(tensor)
            place = next((place for place, output in places.items() if output == made), None)
            if place is None or len(node.inputs) <= place or node.inputs[place] not in pasts:
                return None, "unknown"
            here: Way = "cursor" if node.op_type in AT_LENGTH else "behind"
            return node.inputs[place], "moved" if way == "moved" else here
        if node.op_type in HANDED_ON:
            tensor = node.inputs[0]
        elif node.op_type in PLACED:
            data, where = PLACED[node.op_type]
            if len(node.inputs) <= where or not follows(producers, node.inputs[where], cursors):
                return None, "unknown"
            tensor, way = node.inputs[data], way or "cursor"
        elif node.op_type == "Where":
            kept = [name for name in node.inputs[1:3] if _leads_to(producers, name, pasts)]
            if len(kept) != 1 or not follows(producers, node.inputs[0], cursors):
                return None, "unknown"
            tensor, way = kept[0], way or "cursor"
        elif node.op_type == "Concat":
            kept = [name for name in node.inputs if _leads_to(producers, name, pasts)]
            if len(kept) != 1:
                return None, "unknown"
            tensor, way = kept[0], way or "behind"
        elif node.op_type in CUT:
            tensor, way = node.inputs[0], "moved"
        else:
            return None, "unknown"
    return tensor, way or "unknown"


def cursor_axis(graph: GraphFacts, present: str, rank: int) -> int | None:
    """The axis of an output along which rows are replaced at a cursor; None where no operator on the way to it says."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    turns: list[tuple[int, ...]] = []
    node, seen = producers.get(present), set[str]()
    while node is not None and node.outputs[0] not in seen:
        seen.add(node.outputs[0])
        if node.op_type in WRITTEN_ALONG:
            said = node.attributes.get("axis", WRITTEN_ALONG[node.op_type])
            axis = said % rank if isinstance(said, int) and rank else None
            for turn in reversed(turns):
                axis = turn.index(axis) if axis in turn else None
            return axis
        if node.op_type == "Transpose":
            order = node.attributes.get("perm", tuple(reversed(range(rank))))
            if not isinstance(order, tuple) or len(order) != rank:
                return None
            turns.append(order)
        elif node.op_type not in ("Identity", "Cast"):
            return None
        node = producers.get(node.inputs[0])
    return None


def _leads_to(producers: dict[str, NodeFact], tensor: str, pasts: Iterable[str]) -> bool:
    """Whether a tensor is an input of the graph with some rows of it replaced, cut off or appended, or as it is."""
    seen = set[str]()
    while tensor not in pasts:
        node = producers.get(tensor)
        if node is None or tensor in seen or node.op_type not in HANDED_ON | CUT | PLACED.keys():
            return False
        seen.add(tensor)
        tensor = node.inputs[0]
    return True


def follows(producers: Mapping[str, NodeFact], tensor: str, cursors: frozenset[str] | None) -> bool:
    """Whether a tensor is computed from one of these inputs, or nobody asks."""
    if cursors is None:
        return True
    left, seen = [tensor], set[str]()
    while left:
        name = left.pop()
        if name in cursors:
            return True
        if name not in seen and (node := producers.get(name)) is not None:
            left += [*node.inputs, *node.inner]
        seen.add(name)
    return False
