"""Models of a node with its neighbours, with the node that contains its subgraph, and inside a subgraph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partita.diagnosis.session_index import SessionIndex
from partita.observations.text_format import name_some
from partita.runtime.lab.graph import CannotProbeError, Graph
from partita.runtime.lab.variant import AUXILIARY, NODE, Variant, finish, part_model, variant_graph, zeros_needed
from partita.runtime.place.model_file import all_nodes, reads, subgraphs_of
from partita.runtime.place.tensor_types import tensor_type

if TYPE_CHECKING:
    import onnx

MOST_SINGLE = 6
"""Maximum number of neighbours tested one by one."""
MOST_TOGETHER = 64
"""Maximum number of neighbours tested together."""
MOST_NAMED = 4
MOST_BYTES = 64 << 20
"""Maximum bytes of weights in an experiment."""
BRANCH = "If"
CONDITION, COUNT = f"{AUXILIARY}_condition", f"{AUXILIARY}_count"
HOLDING = frozenset({BRANCH, "Loop", "Scan", "SequenceMap"})
IN = {False: "the subgraph of a Loop", True: "the branch of an If"}
WITH = {False: "an Identity, both in the subgraph of a Loop,", True: "a node like it in the other branch of an If"}
BOOL, INT64 = 9, 7
"""ONNX's element type numbers."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A node with some of its neighbours."""

    description: str
    """Names and operators of the neighbours, e.g. `first (Relu)`."""
    model: onnx.ModelProto


def neighbourhoods(graph: Graph, name: str) -> Iterator[Neighbourhood]:
    """The node with each of up to six neighbours, then with all; a subgraph node with the node that contains it."""
    nodes = {node.name: node for node in graph.proto.graph.node if node.name}
    if name not in nodes:
        yield from _with_holder(graph, nodes.values(), name)
        return
    adjacent = _edges(nodes)[name]
    groups = [{name, other} for other in list(adjacent)[:MOST_SINGLE]]
    if 1 < len(adjacent) <= MOST_TOGETHER:
        groups.append({name, *adjacent})
    for chosen in groups:
        if (model := _model(graph, chosen, name)) is not None:
            if zeros_needed([model]) > MOST_BYTES:
                return
            others = [f"{own} ({node.op_type})" for own, node in nodes.items() if own in chosen and own != name]
            yield Neighbourhood(name_some(others, MOST_NAMED), model)


def _with_holder(graph: Graph, nodes: Iterable[onnx.NodeProto], name: str) -> Iterator[Neighbourhood]:
    """The main graph's node that contains a node, with all its subgraphs; none if too large."""
    found = graph.find(name)
    for holder in nodes if found is not None else ():
        if any(inner is found for body in subgraphs_of(holder) for inner in all_nodes(body)):
            model = _model(graph, [holder.name], found.name if found is not None else name)
            if model is not None and zeros_needed([model]) <= MOST_BYTES:
                yield Neighbourhood(f"{holder.name} ({holder.op_type}), whose subgraph contains it,", model)


def _edges(nodes: Mapping[str, onnx.NodeProto]) -> dict[str, dict[str, None]]:
    """The adjacent nodes of each node, in graph order."""
    makers = {output: name for name, node in nodes.items() for output in node.output if output}
    found: dict[str, dict[str, None]] = {name: {} for name in nodes}
    for name, node in nodes.items():
        for maker in (makers[read] for read in reads(node) if read in makers):
            found[name][maker] = found[maker][name] = None
    return found


def _model(graph: Graph, chosen: Iterable[str], name: str) -> onnx.ModelProto | None:
    """The nodes as a model in which `name` is under test; None if a type is unknown."""
    wanted = set(chosen)
    try:
        model = part_model(graph, [node.name for node in graph.proto.graph.node if node.name in wanted], fixed=False)
    except CannotProbeError:
        return None
    for number, node in enumerate(all_nodes(model.graph)):
        node.name = NODE if node.name == name else f"{AUXILIARY}{number}"
    return model


# --- subgraphs ---


def holder_of(graph: Graph, name: str) -> str:
    """The operator of the main graph's node whose subgraph contains a node; empty if it is in the main graph."""
    for holder in graph.proto.graph.node:
        if any(inner.name == name for body in subgraphs_of(holder) for inner in all_nodes(body)):
            return str(holder.op_type)
    return ""


def holder_in_run(index: SessionIndex, graph: Graph, name: str) -> str:
    """The operator of the node in whose subgraph a node runs, if known; empty in the main graph.

    A node only in a subgraph of the file is listed under another name. A node without a name is placed with the node
    that it belongs to. A SequenceMap becomes a Loop.
    """
    if name in index.inner and name in index.assigned:
        return holder_of(graph, name)
    owners = index.parts.get(name, ()) if name in index.assigned and name not in index.present else ()
    found = (holder_of(graph, owner) or index.exported_op(owner) for owner in owners)
    return next((op for op in found if op in HOLDING), "")


def holder_models(variant: Variant, op_type: str, *, unchanged: bool) -> tuple[str, onnx.ModelProto]:
    """A description and a model with the node in a branch of an If (decided by an input) or in a Loop's subgraph."""
    import onnx

    branch, alone = op_type == BRANCH, variant_graph(variant)
    graph = onnx.GraphProto(name=NODE, input=alone.input, initializer=alone.initializer)
    graph.input.add(name=CONDITION, type=tensor_type(BOOL, ()))
    outputs = [port.name for port in alone.output]
    body = onnx.GraphProto(name=f"{NODE}_body", node=alone.node)
    if branch:
        other = onnx.GraphProto(name=f"{AUXILIARY}_body")
        twin = deepcopy(alone.node[0])
        twin.name = f"{AUXILIARY}1"
        twin.output[:] = [f"{AUXILIARY}_{name}" if name else "" for name in twin.output]
        other.node.append(twin)
        for name in outputs:
            body.output.add(name=name)
            other.output.add(name=f"{AUXILIARY}_{name}")
        inputs, attributes = [CONDITION], {"then_branch": body, "else_branch": other}
    else:
        goes_on, count = f"{AUXILIARY}_goes_on", f"{AUXILIARY}_i"
        graph.input.add(name=COUNT, type=tensor_type(INT64, ()))
        body.input.add(name=count, type=tensor_type(INT64, ()))
        body.input.add(name=goes_on, type=tensor_type(BOOL, ()))
        again = onnx.helper.make_node("Identity", [goes_on], [f"{goes_on}_again"], name=f"{AUXILIARY}1")
        body.node.append(again)
        body.output.add(name=f"{goes_on}_again", type=tensor_type(BOOL, ()))
        for name in outputs:
            body.output.add(name=name)
        inputs, attributes = [COUNT, CONDITION], {"body": body}
    made = [f"{NODE}_{name}" for name in outputs]
    kind = BRANCH if branch else "Loop"
    graph.node.append(onnx.helper.make_node(kind, inputs, made, name=f"{AUXILIARY}0", **attributes))
    for name in made:
        graph.output.add(name=name)
    model = finish(graph, variant.opsets, variant.ir_version, variant.functions)
    return (WITH if unchanged else IN)[branch], model
