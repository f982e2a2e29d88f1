"""How a graph computes the next value of a cached tensor, traced from the output back to the input. Pure.

    Behind        new rows appended to past: Concat, attention with its own Concat, GroupQueryAttention's present
    At a cursor   rows of past replaced at an input position: Scatter, TensorScatter, Where
    Moved         a part of past with appended rows: the oldest rows are dropped, and all rows move

A static cache is supported only if its rows do not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from partita.foreign import GraphFacts, NodeFact

AxisOrigin = Literal["behind", "cursor", "moved", "unknown"]
CONTRIB, GQA = "com.microsoft", "GroupQueryAttention"
HANDED_ON = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that keep the order of rows."""
PLACED = {"ScatterND": (0, 1), "ScatterElements": (0, 1), "Scatter": (0, 1), "TensorScatter": (0, 2)}
"""Operators that replace rows -> input of the tensor, and of the positions."""
WRITTEN_ALONG = {"ScatterElements": 0, "Scatter": 0, "TensorScatter": -2}
"""Operators that replace rows along an axis -> default axis."""
CUT = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Split"})
CACHED_BY = {
    (CONTRIB, GQA): {3: 1, 4: 2},
    (CONTRIB, "SparseAttention"): {3: 1, 4: 2},
    (CONTRIB, "MultiHeadAttention"): {6: 1, 7: 2},
    (CONTRIB, "DecoderMaskedMultiHeadAttention"): {5: 1, 6: 2},
    ("", "Attention"): {4: 1, 5: 2},
}
"""Attention operators with a cache -> inputs of past keys and values, and the outputs that continue them."""
AT_LENGTH = frozenset({GQA, "SparseAttention", "DecoderMaskedMultiHeadAttention"})
"""Of these, operators that write new rows after the valid ones of a longer buffer."""


def attention_places(node: NodeFact) -> dict[int, int]:
    """Inputs of past -> outputs that continue them; empty for a node without a cache."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return CACHED_BY.get((domain, node.op_type), {})


def carried(graph: GraphFacts, present: str, cursors: frozenset[str] | None = None) -> tuple[str | None, AxisOrigin]:
    """The input that an output continues, or None, and how. `cursors`: inputs with positions of new rows."""
    output = graph.output(present)
    pasts = {port.name for port in graph.inputs if output is not None and port.dtype == output.dtype}
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    way: AxisOrigin | None = None
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
            here: AxisOrigin = "cursor" if node.op_type in AT_LENGTH else "behind"
            return node.inputs[place], "moved" if way == "moved" else here
        if node.op_type in HANDED_ON:
            tensor = node.inputs[0]
        elif node.op_type in PLACED:
            data, where = PLACED[node.op_type]
            if len(node.inputs) <= where or not follows(producers, node.inputs[where], cursors):
                return None, "unknown"
            tensor, way = node.inputs[data], way or "cursor"
        elif node.op_type == "Where":
            continued = [name for name in node.inputs[1:3] if _leads_to(producers, name, pasts)]
            if len(continued) != 1 or not follows(producers, node.inputs[0], cursors):
                return None, "unknown"
            tensor, way = continued[0], way or "cursor"
        elif node.op_type == "Concat":
            continued = [name for name in node.inputs if _leads_to(producers, name, pasts)]
            if len(continued) != 1:
                return None, "unknown"
            tensor, way = continued[0], way or "behind"
        elif node.op_type in CUT:
            tensor, way = node.inputs[0], "moved"
        else:
            return None, "unknown"
    return tensor, way or "unknown"


def cursor_axis(graph: GraphFacts, present: str, rank: int) -> int | None:
    """The axis along which rows of an output are replaced at a cursor; None where no operator shows it."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    turns: list[tuple[int, ...]] = []
    node, seen = producers.get(present), set[str]()
    while node is not None and node.outputs[0] not in seen:
        seen.add(node.outputs[0])
        if node.op_type in WRITTEN_ALONG:
            written_axis = node.attributes.get("axis", WRITTEN_ALONG[node.op_type])
            axis = written_axis % rank if isinstance(written_axis, int) and rank else None
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
    """Whether a tensor is a graph input, possibly with rows replaced, cut off or appended."""
    seen = set[str]()
    while tensor not in pasts:
        node = producers.get(tensor)
        if node is None or tensor in seen or node.op_type not in HANDED_ON | CUT | PLACED.keys():
            return False
        seen.add(tensor)
        tensor = node.inputs[0]
    return True


def follows(producers: Mapping[str, NodeFact], tensor: str, cursors: frozenset[str] | None) -> bool:
    """Whether a tensor is computed from one of `cursors`; True for None."""
    if cursors is None:
        return True
    pending, seen = [tensor], set[str]()
    while pending:
        name = pending.pop()
        if name in cursors:
            return True
        if name not in seen and (node := producers.get(name)) is not None:
            pending += [*node.inputs, *node.subgraph_inputs]
        seen.add(name)
    return False


ROTARY = "RotaryEmbedding"
COMPARED = frozenset({"Greater", "GreaterOrEqual"})


def frequencies_change_at(graph: GraphFacts) -> int:
    """The length beyond which an If selects other tables for rotary embeddings (LongRoPE); 0: none."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    limits = []
    for node in graph.nodes:
        compare = producers.get(node.inputs[0]) if node.op_type == "If" and node.inputs else None
        readers = (reader for output in node.outputs for reader in graph.readers_of(output))
        if compare is None or compare.op_type not in COMPARED or len(compare.inputs) < 2:
            continue
        limit = graph.integer_constants.get(compare.inputs[1], 0)
        if limit > 1 and any(reader.op_type in (GQA, ROTARY) for reader in readers):
            limits.append(limit - (compare.op_type == "GreaterOrEqual"))
    return min(limits, default=0)
