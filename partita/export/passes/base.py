"""The interface of a pass, its context, and helpers: constants, consumers, node replacement, removal of dead nodes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from partita.export.trace.attention import Fused
from partita.package.contract import Port, Role, State

if TYPE_CHECKING:
    from partita.export.trace.ports import TraceSpec


ATTENTION = "GroupQueryAttention"


def nothing(node: ir.Node) -> bool:
    """Answers no for every node: there is no provider to probe."""
    return False


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A graph of a package, and the facts about it. Passes match roles and states, never names."""

    model: ir.Model
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[State, ...]
    spec: TraceSpec
    fused: Fused = "none"
    """The operators that a pass may fuse nodes into."""
    supports: Callable[[ir.Node], bool] = nothing
    """Whether the provider of the package supports a node."""
    has_router: bool = False
    """It has experts and a router."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    file: str = "model.onnx"
    phase: Literal["any", "prefill", "decode"] = "any"

    @property
    def graph(self) -> ir.Graph:
        """The graph of the model."""
        return self.model.graph

    def copy(self) -> TracedGraph:
        """The same facts about a copy of the model."""
        return dataclasses.replace(self, model=self.model.clone())

    def input(self, role: Role) -> ir.Value | None:
        """The graph input of that role; None where there is none."""
        names = {port.name for port in self.inputs if port.role == role}
        return next((value for value in self.graph.inputs if value.name in names), None)

    def accepts(self, new: ir.Node, old: ir.Node | None = None) -> bool:
        """Whether the provider supports `new`, or neither it nor `old`; otherwise `new` is disconnected."""
        if self.supports(new) or (old is not None and self.supports is not nothing and not self.supports(old)):
            return True
        discard(new)
        return False

    def state_values(self) -> Iterator[tuple[State, ir.Value, ir.Value]]:
        """Every state of the graph with its input and output values, which share a buffer."""
        pasts = {value.name: value for value in self.graph.inputs}
        presents = {value.name: value for value in self.graph.outputs}
        for state in self.states:
            if state.past in pasts and state.present in presents:
                yield state, pasts[state.past], presents[state.present]


@dataclass(frozen=True, slots=True)
class Pass:
    """A graph rewrite that does not change the values that the graph computes."""

    name: str
    run: Callable[[TracedGraph], int]
    """Changes the model in place; returns the number of changes."""
    required: bool = False
    """It cannot be skipped, because the graph may compute wrong values without it."""

    @property
    def description(self) -> str:
        """The docstring of its module, with the graph before and after."""
        return (sys.modules[self.run.__module__].__doc__ or "").strip()

    @property
    def summary(self) -> str:
        """The first sentence of the description, without the full stop."""
        return " ".join(self.description.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def rewrite_nodes(graph: ir.Graph, operators: Collection[str], change: Callable[[ir.Node], int]) -> int:
    """Call `change` with every node of these operators that is still in the graph. Returns the sum of its results."""
    count = 0
    for node in [node for node in graph if node.op_type in operators]:
        if node.graph is graph:
            count += change(node)
    drop_unused_initializers(graph)
    return count


Change = Callable[[ir.Graph, ir.Node, TracedGraph], int]
"""Rewrites the place around one node; returns the number of changes."""


def node_pass(name: str, operators: Collection[str], change: Change, *fused: Fused) -> Pass:
    """A pass that calls `change` with every node of these operators, where fused operators are one of `fused`, if any.

    `change` is in the module that describes the pass.
    """

    def run(traced: TracedGraph) -> int:
        if fused and traced.fused not in fused:
            return 0
        return rewrite_nodes(traced.graph, operators, lambda node: change(traced.graph, node, traced))

    run.__module__ = change.__module__
    return Pass(name, run)


def constant(value: ir.Value | None) -> list[Any] | None:
    """Elements of a small constant as a flat list; None for other values."""
    if value is None or value.const_value is None or value.const_value.size > 64:
        return None
    return list(value.const_value.numpy().reshape(-1).tolist())


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The only consumer of `value`; None with several or for a graph output."""
    uses = tuple(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def take_names(new: ir.Node, old: ir.Node) -> None:
    """Copy the metadata of `old` (module, class and source line) to `new`."""
    new.metadata_props.update(old.metadata_props)


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Replace `old` with `new`, and remove it with the nodes that only it read."""
    graph.insert_before(old, new)
    for before, after in zip(old.outputs, new.outputs, strict=True):
        after.shape, after.type = before.shape, before.type
        if before.is_graph_output():
            name = before.name
            before.name = f"{name}_replaced"
            after.name = name
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    remove_unread(graph, [old])


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node | None]) -> None:
    """Remove nodes that are no longer read, and their inputs that only they read."""
    for node in nodes:
        if node is None or node.graph is not graph or any(o.uses() or o.is_graph_output() for o in node.outputs):
            continue
        before = [v.producer() for v in node.inputs if v is not None]
        graph.remove(node, safe=True)
        remove_unread(graph, before)


def discard(node: ir.Node) -> None:
    """Disconnect the inputs of an unused node, so that values do not list it as a consumer."""
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)


def stand_in(graph: ir.Graph, value: ir.Value, new: ir.Node) -> None:
    """Replace `value`, which is no graph output, with the first output of `new`. Remove dead nodes."""
    old = value.producer()
    assert old is not None
    take_names(new, old)
    after = new.outputs[0]
    after.shape, after.type = value.shape, value.type
    graph.insert_before(old, new)
    value.replace_all_uses_with(after)
    remove_unread(graph, [old])


def added(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """An initializer with this tensor; an existing one of that name is reused."""
    if name not in graph.initializers:
        kind = ir.TensorType(tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        graph.initializers[name] = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
    return graph.initializers[name]


def integers(graph: ir.Graph, values: Sequence[int | None], name: str = "") -> ir.Value:
    """An int64 constant of the graph; without a `name` it is called after its values, and shared."""
    name = name or "shape." + ".".join(map(str, values))
    return added(graph, ir.tensor(np.array(values, np.int64), name=name), name)


def drop_unused_initializers(graph: ir.Graph) -> None:
    """Remove initializers that no node reads."""
    for name in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        del graph.initializers[name]
