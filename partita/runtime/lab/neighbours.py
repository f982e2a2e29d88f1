"""Models of a node with its neighbours or quantised group, with the node around its subgraph, and inside a subgraph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import onnx

from partita import dtypes
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import Substitution
from partita.observations.text_format import name_some
from partita.runtime.lab.change import cast
from partita.runtime.lab.graph import CannotProbeError, Graph, rename
from partita.runtime.lab.placement import AUXILIARY, NODE
from partita.runtime.lab.variant import Variant, finish, is_signed, part_model, variant_graph, zeros_needed
from partita.runtime.place.model_file import all_nodes, subgraphs_of, tensors_read
from partita.runtime.place.tensor_types import element_of, tensor_type, tensor_types

MOST_SINGLE = 6
"""Maximum number of neighbours tested one by one."""
MOST_TOGETHER = 64
"""Maximum number of neighbours tested together."""
MOST_NAMED = 4
MOST_BYTES = 1 << 30
"""Maximum bytes of the largest weight in an experiment."""
BRANCH = "If"
CONDITION, COUNT, GOES_ON = (f"{AUXILIARY}_{name}" for name in ("condition", "count", "goes_on"))
HOLDING = frozenset({BRANCH, "Loop", "Scan", "SequenceMap"})
IN = {False: "the subgraph of a Loop", True: "the branch of an If"}
WITH = {False: "an Identity, both in the subgraph of a Loop,", True: "a node like it in the other branch of an If"}
QUANTISING: Mapping[str, int] = {"QuantizeLinear": 1, "DequantizeLinear": 0}
"""Operators with a quantised tensor, and whether it is their output."""
QUANTISED = dtypes.numbers("uint8", "int8", "uint16", "int16")


def neighbourhoods(graph: Graph, name: str, *, inside: bool = False) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Descriptions and models of the node with each of up to six neighbours, then with all, and its quantised group.

    For a node in a subgraph: the node that contains it. `inside`: tensors that are not inputs or outputs of the graph
    are not those of the model either.
    """
    nodes = {node.name: node for node in graph.proto.graph.node if node.name}
    if name not in nodes:
        own = graph.find(name)
        holder = holder_of(graph, own)
        if own is not None and holder is not None and (model := _model(graph, [holder.name], own.name)) is not None:
            yield f"{holder.name} ({holder.op_type}), whose subgraph contains it,", model
        return
    adjacent = _edges(nodes)[name]
    groups = [{name, other} for other in list(adjacent)[:MOST_SINGLE]]
    if 1 < len(adjacent) <= MOST_TOGETHER:
        groups.append({name, *adjacent})
    if nodes[name].op_type in QUANTISING and (group := set(_group(nodes, name))) and group not in groups:
        groups.append(group)
    for chosen in groups:
        if (model := _model(graph, chosen, name)) is not None:
            if inside:
                _keep_inside(model.graph, graph)
            others = [f"{own} ({node.op_type})" for own, node in nodes.items() if own in chosen and own != name]
            yield name_some(others, MOST_NAMED), model


def _keep_inside(part: onnx.GraphProto, graph: Graph) -> None:
    """Add a Neg at the signed inputs and outputs of the part that are not those of the graph.

    Some providers treat nodes at the inputs and outputs of a graph differently, e.g. QuantizeLinear.
    """
    borders = {port.name for port in graph.proto.graph.input} | graph.outputs
    for number, port in enumerate([*part.input, *part.output]):
        if port.name in borders or not is_signed(port.type):
            continue
        inner, name = port.name, f"{AUXILIARY}_{port.name}"
        if number < len(part.input):
            for node in part.node:
                rename(node, {inner: name})
            part.node.insert(0, onnx.helper.make_node("Neg", [inner], [name], name=f"{AUXILIARY}_in{number}"))
        else:
            part.node.append(onnx.helper.make_node("Neg", [inner], [name], name=f"{AUXILIARY}_out{number}"))
            part.value_info.add(name=inner, type=port.type)
            port.name = name


def _edges(nodes: Mapping[str, onnx.NodeProto]) -> dict[str, dict[str, None]]:
    """The adjacent nodes of each node, in graph order."""
    makers = {output: name for name, node in nodes.items() for output in node.output if output}
    found: dict[str, dict[str, None]] = {name: {} for name in nodes}
    for name, node in nodes.items():
        for maker in (makers[read] for read in tensors_read(node) if read in makers):
            found[name][maker] = found[maker][name] = None
    return found


def _model(graph: Graph, chosen: Iterable[str], name: str) -> onnx.ModelProto | None:
    """The nodes as a model in which `name` is under test; None if a type is unknown or the weights are too large."""
    wanted = set(chosen)
    try:
        model = part_model(graph, [node.name for node in graph.proto.graph.node if node.name in wanted], fixed=False)
    except CannotProbeError:
        return None
    for number, node in enumerate(all_nodes(model.graph)):
        node.name = NODE if node.name == name else f"{AUXILIARY}{number}"
    return model if zeros_needed(model) <= MOST_BYTES else None


# --- quantised groups ---


def quantised_groups(graph: Graph, name: str) -> Iterator[tuple[Substitution, onnx.ModelProto]]:
    """A node with the other nodes of its quantised group, which have another quantised type.

    A group is a node with the DequantizeLinear nodes before it and the QuantizeLinear nodes behind it.
    """
    nodes = {node.name: node for node in graph.proto.graph.node if node.name}
    chosen = _group(nodes, name) if name in nodes else []
    model = _model(graph, chosen, name) if chosen else None
    if model is None:
        return
    known = tensor_types(model)
    quantising = {own: node for own, node in zip(chosen, model.graph.node, strict=True) if node.op_type in QUANTISING}
    elements = {
        own: element_of(known[tensor])
        for own, node in quantising.items()
        if (tensor := _quantised_tensor(node)) in known
    }
    for old, new in itertools.permutations(QUANTISED, 2):
        members = [own for own, element in elements.items() if element == old]
        if set(members) - {name} and (new in elements.values() or new == QUANTISED[0]):
            place = f"in {name_some([f'{each} ({nodes[each].op_type})' for each in members], MOST_NAMED)}"
            words = Substitution(dtypes.dtype_numbered(new).name, dtypes.dtype_numbered(old).name, place)
            yield words, _retyped(model, old, new)


def _group(nodes: Mapping[str, onnx.NodeProto], name: str) -> list[str]:
    """The quantised group of a node, in graph order; empty if it is in none."""
    adjacent = _edges(nodes)
    centre = next((each for each in (name, *adjacent[name]) if nodes[each].op_type not in QUANTISING), "")
    around = {each for each in adjacent.get(centre, ()) if nodes[each].op_type in QUANTISING}
    return [each for each in nodes if each in {centre, *around}] if name in {centre, *around} and around else []


def _quantised_tensor(node: onnx.NodeProto) -> str:
    """The quantised tensor of a QuantizeLinear or DequantizeLinear."""
    return str(node.output[0] if QUANTISING[node.op_type] else node.input[0])


def _retyped(model: onnx.ModelProto, old: int, new: int) -> onnx.ModelProto:
    """The model with another element type in its quantised tensors and zero points of type `old`."""
    model = deepcopy(model)
    graph, known = model.graph, tensor_types(model)
    names = set[str]()
    for node in (node for node in graph.node if node.op_type in QUANTISING):
        if (tensor := _quantised_tensor(node)) in known and element_of(known[tensor]) == old:
            names.update((tensor, *node.input[2:3]))
            for attribute in node.attribute:
                attribute.i = new if attribute.name == "output_dtype" and attribute.i == old else attribute.i
    for tensor in graph.initializer:
        if tensor.name in names:
            tensor.CopyFrom(cast(tensor, new))
    for port in (*graph.input, *graph.output, *graph.value_info):
        if port.name in names:
            port.type.tensor_type.elem_type = new
    return model


# --- subgraphs ---


def holder_of(graph: Graph, node: onnx.NodeProto | None) -> onnx.NodeProto | None:
    """The main graph's node whose subgraph contains a node; None if it is in the main graph."""
    holders = (
        holder
        for holder in graph.proto.graph.node
        if any(inner is node for body in subgraphs_of(holder) for inner in all_nodes(body))
    )
    return next(holders, None) if node is not None else None


def holder_in_run(index: SessionIndex, graph: Graph, name: str) -> str:
    """The operator of the node in whose subgraph a node runs, if known; empty in the main graph.

    A node only in a subgraph of the file is listed under another name. A node without a name is placed with the node
    that it belongs to. A SequenceMap becomes a Loop.
    """
    if name not in index.assignments:
        return ""
    if name in index.subgraph_nodes:
        holder = holder_of(graph, graph.nodes.get(name))
        return holder.op_type if holder is not None else ""
    owners = index.possible_functions.get(name, ()) if name not in index.present else ()
    holders = [(owner, holder_of(graph, graph.nodes.get(owner))) for owner in owners]
    found = (node.op_type for owner, holder in holders if (node := holder or index.of_file(owner)) is not None)
    return next((op for op in found if op in HOLDING), "")


def holder_models(variant: Variant, op_type: str, *, unchanged: bool) -> tuple[str, onnx.ModelProto]:
    """A description and a model with the node in a branch of an If (decided by an input) or in a Loop's subgraph."""
    branch, alone = op_type == BRANCH, variant_graph(variant)
    outputs = [port.name for port in alone.output]
    body = onnx.GraphProto(name=f"{NODE}_body", node=alone.node)
    graph = onnx.GraphProto(name=NODE, input=alone.input, initializer=alone.initializer)
    graph.input.add(name=CONDITION, type=tensor_type(onnx.TensorProto.BOOL, ()))
    inputs, attributes = [CONDITION], {"then_branch": body}
    if branch:
        other = attributes["else_branch"] = onnx.GraphProto(name=f"{AUXILIARY}_body", node=alone.node)
        other.node[0].name = f"{AUXILIARY}1"
        other.node[0].output[:] = [f"{AUXILIARY}_{name}" if name else "" for name in alone.node[0].output]
        other.output.extend(onnx.ValueInfoProto(name=f"{AUXILIARY}_{name}") for name in outputs)
    else:
        again, count = f"{AUXILIARY}_again", f"{AUXILIARY}_i"
        graph.input.add(name=COUNT, type=tensor_type(onnx.TensorProto.INT64, ()))
        body.input.add(name=count, type=tensor_type(onnx.TensorProto.INT64, ()))
        body.input.add(name=GOES_ON, type=tensor_type(onnx.TensorProto.BOOL, ()))
        body.node.append(onnx.helper.make_node("Identity", [GOES_ON], [again], name=f"{AUXILIARY}1"))
        body.output.add(name=again, type=tensor_type(onnx.TensorProto.BOOL, ()))
        inputs, attributes = [COUNT, CONDITION], {"body": body}
    body.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    made = [f"{NODE}_{name}" for name in outputs]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    holder = BRANCH if branch else "Loop"
    graph.node.append(onnx.helper.make_node(holder, inputs, made, name=f"{AUXILIARY}0", **attributes))
    return (WITH if unchanged else IN)[branch], finish(graph, variant.opsets, variant.ir_version)
