"""Tensor names that mean one thing in the whole model: bodies of control flow may use a name that another body uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def one_meaning(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with names of their own for the tensors of each body; itself when it has no bodies."""
    import onnx

    if not any(
        attribute.HasField("g") or attribute.graphs for node in proto.graph.node for attribute in node.attribute
    ):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    numbers = itertools.count()
    for node in copy.graph.node:
        rename_bodies(node, {}, numbers)
    return copy


def rename_bodies(node: onnx.NodeProto, outer: Mapping[str, str], numbers: Iterator[int]) -> None:
    """Give every tensor of the node's bodies a new name; `outer`: what names of the graphs around have become."""
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            if body.node or body.output:
                rename_body(body, outer, numbers)


def rename_body(body: onnx.GraphProto, outer: Mapping[str, str], numbers: Iterator[int]) -> None:
    """Give every tensor that the body defines a new name, in it and in the bodies within."""
    suffix = f"@{next(numbers)}"
    own = [port.name for port in body.input] + [tensor.name for tensor in body.initializer]
    own += [sparse.values.name for sparse in body.sparse_initializer]
    own += [name for node in body.node for name in node.output if name]
    names = {**outer, **{name: f"{name}{suffix}" for name in own}}
    for port in (*body.input, *body.output, *body.value_info):
        port.name = names.get(port.name, port.name)
    for tensor in (*body.initializer, *(sparse.values for sparse in body.sparse_initializer)):
        tensor.name = names.get(tensor.name, tensor.name)
    for node in body.node:
        for listed in (node.input, node.output):
            for position, name in enumerate(listed):
                listed[position] = names.get(name, name)
        rename_bodies(node, names, numbers)
