"""What a pass is and what it is told: a graph's ports by role, its states, its sizes, and what the package is for."""

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
    """The answer where nobody can be asked."""
    return False


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may know of a graph besides its nodes. Passes match roles and states, never names."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[State, ...]
    spec: TraceSpec
    precision: Precision
    target: Target | None = None
    """The provider that the package is for; None when nobody is asked."""
    fused: Fused = "none"
    """The operators that a pass may put in the place of several nodes."""
    takes: Callable[[ir.Node], bool] = nothing
    """Whether the provider that the package is for takes a node; asked before it is written."""

    def input(self, graph: ir.Graph, role: Role) -> ir.Value | None:
        """The graph input of that role; None when the graph has none."""
        names = {port.name for port in self.inputs if port.role == role}
        return next((value for value in graph.inputs if value.name in names), None)

    def keeps(self, new: ir.Node, old: ir.Node) -> bool:
        """Whether `new` may stand for `old`, a node of the same operator that does less: the provider takes it, or
        neither. Then the CPU provider, which has the operator, runs both, and what goes into `new` saves copies.
        False where nobody can be asked.
        """
        return self.takes is not nothing and (self.takes(new) or not self.takes(old))

    def state_values(self, graph: ir.Graph) -> Iterator[tuple[State, ir.Value, ir.Value]]:
        """Every state of the graph: the input that is read and the output that is written, in the same buffer."""
        pasts = {value.name: value for value in graph.inputs}
        presents = {value.name: value for value in graph.outputs}
        for state in self.states:
            if state.past in pasts and state.present in presents:
                yield state, pasts[state.past], presents[state.present]


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite of a graph, equal to the identity on the values that the graph computes."""

    name: str
    run: Callable[[ir.Model, PassContext], int]
    """Changes the model in place; returns the number of places it changed."""
    required: bool = False
    """Without it a graph may compute something else: it cannot be left out."""

    @property
    def description(self) -> str:
        """What it does, with the graph before and after: the docstring of its file."""
        return (sys.modules[self.run.__module__].__doc__ or "").strip()

    @property
    def summary(self) -> str:
        """The description's first sentence, without the full stop."""
        return " ".join(self.description.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


class OverNodeError(Exception):
    """What failed over one node; the cause says what."""

    def __init__(self, node: ir.Node) -> None:
        super().__init__(f"node {node.name!r} ({node.op_type})")
        self.node = node


@contextmanager
def over(node: ir.Node) -> Iterator[None]:
    """Let whatever fails in the block be known to have failed over `node`; the innermost node counts."""
    try:
        yield
    except (PartitaError, OverNodeError):
        raise
    except Exception as error:
        raise OverNodeError(node) from error
