"""How a graph computes the next value of a cached tensor, traced from the output back to the input. Pure.

    Behind        new rows appended to past: Concat, attention with its own Concat, GroupQueryAttention's present
    At a cursor   rows of past replaced at an input position: Scatter, TensorScatter, Where
    Moved         a part of past with appended rows: the oldest rows are dropped, and all rows move

A static cache is supported only if its rows do not move.

Find the length beyond which a graph uses other rotary frequencies. Pure.

    Another table     if a length exceeds the trained length, cosines and sines of another table
    Moved positions   positions + (their maximum >= the trained length) * that length: another part of one table
    A table of two    one table with the first position's row twice, for consumers that know the second part

These are LongRoPE models of onnxruntime-genai's builder for different providers.
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
POSITIONS = {("", ROTARY): 3, (CONTRIB, ROTARY): 1, (CONTRIB, GQA): 9}
SINES = {("", ROTARY): 2, (CONTRIB, ROTARY): 3, (CONTRIB, GQA): 8}
"""Operators with a rotary embedding -> input of the positions, and of the sine table."""
COMPARED = frozenset({"Greater", "GreaterOrEqual"})
MOVED_BY = frozenset({"Add", "Mul", "Where"})
SAME_NUMBERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"})
ONE_OF_THEM = frozenset({"ReduceMax", "Gather", "Slice"})


def sine_tables(nodes: Iterable[NodeFact]) -> frozenset[str]:
    """The tensors from which rotary embeddings read sines."""
    return frozenset(name for node in nodes for name in _input(node, SINES))


def frequencies_change_at(graph: GraphFacts, positions: frozenset[str]) -> int:
    """The length beyond which a graph uses other cosines and sines, by inputs `positions`; 0: none."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    limits = [graph.restarting_tables[name] for name in sine_tables(graph.nodes) if name in graph.restarting_tables]
    for asks in (*_of_tables(graph, producers), *_of_positions(graph, producers, positions)):
        # The largest position of n tokens is n - 1.
        most = graph.integer_constants.get(asks.inputs[1], 0) + _is_position(asks.inputs[0], producers, positions)
        limits.append(most - (asks.op_type == "GreaterOrEqual"))
    return min((limit for limit in limits if limit > 0), default=0)


def _of_tables(graph: GraphFacts, producers: Mapping[str, NodeFact]) -> Iterable[NodeFact]:
    """The comparisons by which an If selects inputs of rotary embeddings."""
    for node in graph.nodes:
        if node.op_type != "If" or not node.inputs:
            continue
        readers = (reader for output in node.outputs for reader in graph.readers_of(output))
        asks = producers.get(node.inputs[0])
        if asks is not None and _is_limit(asks, graph) and any(reader.op_type in (GQA, ROTARY) for reader in readers):
            yield asks


def _of_positions(
    graph: GraphFacts, producers: Mapping[str, NodeFact], positions: frozenset[str]
) -> Iterable[NodeFact]:
    """The comparisons that change positions of rotary embeddings."""
    pending = list({name for node in graph.nodes for name in _input(node, POSITIONS)})
    seen = set[str]()
    while pending:
        name = pending.pop()
        node = producers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in MOVED_BY | SAME_NUMBERS:
            pending += node.inputs
        elif _is_limit(node, graph) and follows(producers, node.inputs[0], positions):
            yield node


def _is_limit(node: NodeFact, graph: GraphFacts) -> bool:
    """Whether a node compares with an integer constant above 1."""
    return node.op_type in COMPARED and len(node.inputs) > 1 and graph.integer_constants.get(node.inputs[1], 0) > 1


def _is_position(tensor: str, producers: Mapping[str, NodeFact], positions: frozenset[str]) -> bool:
    """Whether a tensor is a position and not a length: nothing is added to it."""
    seen = set[str]()
    while tensor not in positions:
        node = producers.get(tensor)
        if node is None or tensor in seen or node.op_type not in SAME_NUMBERS | ONE_OF_THEM or not node.inputs:
            return False
        seen.add(tensor)
        tensor = node.inputs[0]
    return True


def _input(node: NodeFact, places: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """The input of a node at its operator's index in `places`; empty without one."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    place = places.get((domain, node.op_type))
    return () if place is None else tuple(filter(None, node.inputs[place : place + 1]))
