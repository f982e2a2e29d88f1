"""The interface of a pass, and its context: ports by role, states, sizes, and the target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partita.errors import PartitaError
from partita.export.trace.attention.base import Fused
from partita.package.contract import Port, Role, State

if TYPE_CHECKING:
    import onnx_ir as ir

    from partita.dtypes import Precision
    from partita.export.target import Target
    from partita.export.trace.spec import TraceSpec


def nothing(node: ir.Node) -> bool:
    """Answers no for every node: there is no provider to probe."""
    return False


@dataclass(frozen=True, slots=True)
class PassContext:
    """Facts about a graph for passes. Passes match roles and states, never names."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[State, ...]
    spec: TraceSpec
    precision: Precision
    target: Target | None = None
    """The provider of the package; None where it is not probed."""
    fused: Fused = "none"
    """The operators that a pass may fuse nodes into."""
    takes: Callable[[ir.Node], bool] = nothing
    """Whether the provider of the package supports a node."""

    def input(self, graph: ir.Graph, role: Role) -> ir.Value | None:
        """The graph input of that role; None where there is none."""
        names = {port.name for port in self.inputs if port.role == role}
        return next((value for value in graph.inputs if value.name in names), None)

    def keeps(self, new: ir.Node, old: ir.Node) -> bool:
        """Whether `new` may replace `old`, a node of the same operator that does less.

        True where the provider supports `new`, or neither: then the CPU provider runs both. False without a provider to
        probe.
        """
        return self.takes is not nothing and (self.takes(new) or not self.takes(old))

    def state_values(self, graph: ir.Graph) -> Iterator[tuple[State, ir.Value, ir.Value]]:
        """Every state of the graph with its input and output values, which share a buffer."""
        pasts = {value.name: value for value in graph.inputs}
        presents = {value.name: value for value in graph.outputs}
        for state in self.states:
            if state.past in pasts and state.present in presents:
                yield state, pasts[state.past], presents[state.present]


@dataclass(frozen=True, slots=True)
class Pass:
    """A graph rewrite that does not change the values that the graph computes."""

    name: str
    run: Callable[[ir.Model, PassContext], int]
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


class OverNodeError(Exception):
    """An error while a pass handled one node; its cause is the exception."""

    def __init__(self, node: ir.Node) -> None:
        super().__init__(f"node {node.name!r} ({node.op_type})")
        self.node = node


@contextmanager
def over(node: ir.Node) -> Iterator[None]:
    """Record that an error in the block occurred at `node`; the innermost node counts."""
    try:
        yield
    except (PartitaError, OverNodeError):
        raise
    except Exception as error:
        raise OverNodeError(node) from error
