"""Foreign folders: a contract inferred for folders of other exporters, so that they can be used like packages.

Here: the contents of an ONNX file as plain data, the input of the inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Size = int | str | None
"""A size of a shape: a number, the name of a symbolic size, or None."""


@dataclass(frozen=True, slots=True)
class PortFact:
    """An input or output of the main graph."""

    name: str
    dtype: str
    """Element type in ONNX's spelling; empty for other types than tensors."""
    shape: tuple[Size, ...] | None
    """None where the rank is unknown."""

    @property
    def declared(self) -> str:
        """Name, type and shape for messages: `past.0.key float32[batch,2,past,16]`."""
        if self.shape is None:
            return f"{self.name} {self.dtype} of unknown rank"
        return f"{self.name} {self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node of the main graph."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float | str | tuple[int, ...]] = field(default_factory=dict)
    """Attributes that are numbers, integer lists, or strings."""
    subgraph_inputs: frozenset[str] = frozenset()
    """Tensors of the main graph that its subgraphs read."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One ONNX file."""

    file: str
    """Relative to the folder, with / as separator."""
    inputs: tuple[PortFact, ...]
    outputs: tuple[PortFact, ...]
    nodes: tuple[NodeFact, ...]
    """Nodes of the main graph."""
    node_count: int
    """Number of nodes, subgraphs included."""
    opsets: Mapping[str, int]
    producer: str
    defaults: tuple[PortFact, ...] = ()
    """Float inputs with a default value in the file."""
    empty: frozenset[str] = frozenset()
    """Names of those with an empty default: a size is 0."""
    integer_constants: Mapping[str, int] = field(default_factory=dict)
    """Scalar integer constants."""
    compared: frozenset[int] = frozenset()
    """Absolute values of integers that nodes of any graph in the file add, subtract, divide by or compare with; 0 where
    it contains a mask of all positions."""
    data_files: tuple[str, ...] = ()
    """Relative to the folder."""
    weight_bytes: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    """Number of stored elements by type."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """Number of nodes by operator, subgraphs included; domain.operator for other domains than ONNX's."""
    quantised_products: Mapping[int, int] = field(default_factory=dict)
    """Products with quantised weights by bits, subgraphs included."""

    def producer_of(self, tensor: str) -> NodeFact | None:
        """The node that computes a tensor; None for inputs and constants."""
        return next((node for node in self.nodes if tensor in node.outputs), None)

    def readers_of(self, tensor: str) -> list[NodeFact]:
        """The nodes that read a tensor, without duplicates, also in their subgraphs."""
        return [node for node in self.nodes if tensor in node.inputs or tensor in node.subgraph_inputs]

    def input(self, name: str) -> PortFact | None:
        """The input of that name."""
        return _named(self.inputs, name)

    def output(self, name: str) -> PortFact | None:
        """The output of that name."""
        return _named(self.outputs, name)


def _named(ports: Iterable[PortFact], name: str) -> PortFact | None:
    return next((port for port in ports if port.name == name), None)
