"""What an ONNX file says of itself, as plain data: all that the inference of a contract looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Size = int | str | None
"""Of a shape: a number, the name of a symbolic size, None where even the name is unknown."""


@dataclass(frozen=True, slots=True)
class PortFact:
    """An input or output of the main graph."""

    name: str
    dtype: str
    """Element type in ONNX's spelling; empty for what is no tensor."""
    shape: tuple[Size, ...] | None
    """None when the rank is unknown."""

    @property
    def declared(self) -> str:
        """Name, type and shape for people: `past.0.key float32[batch,2,past,16]`."""
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
    """Those that are a number, whole numbers, or text."""
    inner: frozenset[str] = frozenset()
    """Tensors of the main graph that the bodies in it read."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One ONNX file."""

    file: str
    """Relative to the folder, with / between its parts."""
    inputs: tuple[PortFact, ...]
    outputs: tuple[PortFact, ...]
    nodes: tuple[NodeFact, ...]
    """Of the main graph."""
    node_count: int
    """Of the main graph and the bodies in it."""
    opsets: Mapping[str, int]
    producer: str
    defaults: tuple[PortFact, ...] = ()
    """Inputs of floats that need not be given, because the file has values for them."""
    empty: frozenset[str] = frozenset()
    """Those of them whose values are none at all: a size is 0."""
    whole: Mapping[str, int] = field(default_factory=dict)
    """Constants that are one whole number."""
    begins_anew: Mapping[str, int] = field(default_factory=dict)
    """Tables of sines in which the row of the first position comes twice, and where it comes again. Looked for only in
    those with more rows than a text may have tokens.
    """
    compared: frozenset[int] = frozenset()
    """Whole numbers that nodes of any graph in the file add, subtract, divide by or compare with, without their sign; 0
    where it holds a mask of all positions.
    """
    data_files: tuple[str, ...] = ()
    """Relative to the folder."""
    weight_bytes: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    """Number of stored elements by type."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """Nodes by operator, those of bodies included; of other domains than ONNX's own as domain.operator."""
    packed: Mapping[int, int] = field(default_factory=dict)
    """Products with packed weights, those of bodies included, by bits of a weight."""

    def producer_of(self, tensor: str) -> NodeFact | None:
        """The node that makes a tensor; None for inputs and constants."""
        return next((node for node in self.nodes if tensor in node.outputs), None)

    def readers_of(self, tensor: str) -> list[NodeFact]:
        """The nodes that read a tensor, once each, those included in whose bodies it is read."""
        return [node for node in self.nodes if tensor in node.inputs or tensor in node.inner]

    def input(self, name: str) -> PortFact | None:
        """The input of that name."""
        return _named(self.inputs, name)

    def output(self, name: str) -> PortFact | None:
        """The output of that name."""
        return _named(self.outputs, name)


def _named(ports: Iterable[PortFact], name: str) -> PortFact | None:
    return next((port for port in ports if port.name == name), None)
