"""Find the length beyond which a graph uses other rotary frequencies. Pure.

    Another table     if a length exceeds the trained length, cosines and sines of another table
    Moved positions   positions + (their maximum >= the trained length) * that length: another part of one table
    A table of two    one table with the first position's row twice, for consumers that know the second part

These are LongRoPE models of onnxruntime-genai's builder for different providers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from partita.foreign.carrying import CONTRIB, GQA, follows
from partita.foreign.facts import GraphFacts, NodeFact

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
    """The length beyond which a graph uses other cosines and sines; 0 where none is found.

    `positions`: inputs with the positions.
    """
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    limits = [graph.begins_anew[name] for name in sine_tables(graph.nodes) if name in graph.begins_anew]
    for asks in (*_of_tables(graph, producers), *_of_positions(graph, producers, positions)):
        # The largest position of n tokens is n - 1.
        most = graph.whole.get(asks.inputs[1], 0) + _is_position(asks.inputs[0], producers, positions)
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
    left = list({name for node in graph.nodes for name in _input(node, POSITIONS)})
    seen = set[str]()
    while left:
        name = left.pop()
        node = producers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in MOVED_BY | SAME_NUMBERS:
            left += node.inputs
        elif _is_limit(node, graph) and follows(producers, node.inputs[0], positions):
            yield node


def _is_limit(node: NodeFact, graph: GraphFacts) -> bool:
    """Whether a node compares with an integer constant above 1."""
    return node.op_type in COMPARED and len(node.inputs) > 1 and graph.whole.get(node.inputs[1], 0) > 1


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
