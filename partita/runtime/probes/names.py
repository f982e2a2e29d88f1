"""Names of tensors: other ones for what a node reads, and one meaning for each in the whole model.

Bodies of control flow may use a name that another body uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from partita.runtime.model_file import all_graphs, bodies, defines

if TYPE_CHECKING:
    import onnx

OwnNames = Callable[[Collection[str]], Mapping[str, str]]
"""What the tensors that a body defines are to be called."""


def _unchanged(own: Collection[str]) -> Mapping[str, str]:
    """Every tensor of a body keeps its name."""
    return {name: name for name in own}


def rename(node: onnx.NodeProto, names: Mapping[str, str], own_names: OwnNames = _unchanged) -> None:
    """Give what a node reads other names, in its bodies too, but for what these define; that is `own_names`' matter."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for body in bodies(node):
        visible = {**names, **own_names(defines(body))}
        tensors = (*body.initializer, *(sparse.values for sparse in body.sparse_initializer))
        for entry in (*body.input, *body.output, *body.value_info, *tensors):
            entry.name = visible.get(entry.name, entry.name)
        for inner in body.node:
            rename(inner, visible, own_names)
            inner.output[:] = [visible.get(name, name) for name in inner.output]


def one_meaning(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with names of their own for the tensors of each body; itself when it has no bodies."""
    import onnx

    if not any(True for node in proto.graph.node for _ in bodies(node)):
        return proto
    numbers = itertools.count()

    def numbered(own: Collection[str]) -> Mapping[str, str]:
        suffix = f"@{next(numbers)}"
        return {name: f"{name}{suffix}" for name in own}

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        rename(node, {}, numbered)
    return copy


def inner_names(node: onnx.NodeProto) -> frozenset[str]:
    """Names that are given to tensors in the bodies of a node, however deep."""
    return frozenset[str]().union(*(defines(graph) for body in bodies(node) for graph in all_graphs(body)))


def free_names(prefix: str, taken: Collection[str]) -> Iterator[str]:
    """`i0`, `i1`, … without those that are taken."""
    return (name for number in itertools.count() if (name := f"{prefix}{number}") not in taken)


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """A deep copy, so that changes do not reach the graph."""
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
