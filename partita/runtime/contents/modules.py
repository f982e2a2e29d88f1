"""The precision of each module's weights, from the nodes that read them.

A weight belongs to the module of the node that computes with it, after nodes that only convert it (Cast, Transpose,
DequantizeLinear). Codes decoded by constant nodes (a Cast or Gather, and a Mul with scales) form one weight with their
scales. Without node metadata, a tensor name that is a module path gives the module.

Inputs and attributes of quantised operators follow onnx/docs/Operators.md and onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from partita import dtypes
from partita.inspection.records import ModulePrecision
from partita.runtime.place.model_file import all_nodes, graph_node, subgraphs_of, tensor_bytes

if TYPE_CHECKING:
    import onnx


UNKNOWN = "unknown"
CARRIERS = frozenset({"Cast", "Transpose", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand"})
"""Operators that pass a weight on, possibly in another type."""
RESTORES = "DequantizeLinear"
TABLED, SMALL_FLOATS = "uint4", "float8"
"""Types of codes that index a table, and of numeric codes."""
SMALL_ELEMENTS = 1024
"""Integer tensors with fewer elements are sizes, axes or indices, not weights."""
DEEPEST = 8
"""Maximum length of a chain of carriers; weights have two or three."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor, without its values."""

    name: str
    """Name of the initializer, or of the output of its Constant."""
    dtype: str
    """Element type; `unknown` for a number that ONNX does not define."""
    elements: int
    size_bytes: int
    """0 for strings."""
    identity: tuple[object, ...]
    """Equal for tensors of the same bytes in the same file."""

    @property
    def is_packed(self) -> bool:
        """Whether it is a quantised matrix of integers."""
        bits = dtypes.bits_of(self.dtype)
        return bits is not None and bits <= 8 and self.dtype != "bool" and self.elements >= SMALL_ELEMENTS

    @property
    def is_weight(self) -> bool:
        """Whether it is a weight, not a size or an index."""
        return self.elements > 1 if dtypes.is_float(self.dtype) else self.is_packed


def initializers(graph: onnx.GraphProto, file: str, home: str, scope: str = "") -> Iterator[TensorEntry]:
    """Stored tensors of a graph of the ONNX file `file`, and of its subgraphs.

    `home`: folder of the external data. `scope`: of a subgraph, for a unique location.
    """
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield _stored_tensor(tensor, tensor.name, file, home, scope)
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield _stored_tensor(attribute.t, node.output[0], file, home, scope)
        for number, body in enumerate(subgraphs_of(node)):
            yield from initializers(body, file, home, f"{scope}{node.name}[{number}]/")


def _stored_tensor(tensor: onnx.TensorProto, name: str, file: str, home: str, scope: str) -> TensorEntry:
    """A tensor of the ONNX file `file`."""
    size, dtype = max(tensor_bytes(tensor), 0), dtypes.name_of(tensor.data_type) or UNKNOWN
    outside = {entry.key: entry.value for entry in tensor.external_data}
    identity: tuple[object, ...] = (file, scope, name)
    if "location" in outside:
        identity = (PurePosixPath(home, outside["location"]), outside.get("offset", "0"), size)
    return TensorEntry(name, dtype, prod(max(dim, 0) for dim in tensor.dims), size, identity)


class QuantisedInputs(NamedTuple):
    """Input positions of a quantised weight, its scales and its zero points; -1: no such input."""

    weight: int
    scales: int
    zero_points: int = -1


@dataclass(frozen=True, slots=True)
class QuantisedOperator:
    """How an operator reads quantised weights."""

    weights: tuple[QuantisedInputs, ...]
    bits: int | None = None
    """Default bits per weight; None: given by the element type."""
    block_size: int | None = None
    """Default of the attribute `block_size`; None: one scale per row, column or tensor."""
    kinds: tuple[str, ...] = ()
    """Names of the values of the attribute `quant_type`, for non-integer weights."""


_EXPERTS = (QuantisedInputs(2, 3, 11), QuantisedInputs(5, 6, 12), QuantisedInputs(8, 9, 13))
QUANTISED: Mapping[str, QuantisedOperator] = {
    "MatMulNBits": QuantisedOperator((QuantisedInputs(1, 2, 3),), 4, 0),
    "MatMulBnb4": QuantisedOperator((QuantisedInputs(1, 2),), 4, 0, kinds=("fp4", "nf4")),
    "GatherBlockQuantized": QuantisedOperator((QuantisedInputs(0, 2, 3),), 4, 128),
    "QMoE": QuantisedOperator(_EXPERTS, 4, 0),
    RESTORES: QuantisedOperator((QuantisedInputs(0, 1, 2),), None, 0),
    "MatMulIntegerToFloat": QuantisedOperator((QuantisedInputs(1, 3, 5),)),
    "DynamicQuantizeMatMul": QuantisedOperator((QuantisedInputs(1, 2, 3),)),
    "MatMulInteger": QuantisedOperator((QuantisedInputs(1, -1, 3),)),
    "ConvInteger": QuantisedOperator((QuantisedInputs(1, -1, 3),)),
    "QLinearMatMul": QuantisedOperator((QuantisedInputs(3, 4, 5),)),
    "QLinearConv": QuantisedOperator((QuantisedInputs(3, 4, 5),)),
    "QGemm": QuantisedOperator((QuantisedInputs(3, 4, 5),)),
    "QAttention": QuantisedOperator((QuantisedInputs(1, 4, 7),)),
}


Weight = tuple[tuple[object, ...], ModulePrecision]
"""The identity of a stored tensor that is a weight, and the row of a table with this weight only."""


def weights_in(proto: onnx.ModelProto, tensors: Sequence[TensorEntry]) -> tuple[Weight, ...]:
    """The weights among the stored `tensors` of a file."""
    readers, found = _Readers(proto, {tensor.name: tensor for tensor in tensors}), []
    for tensor in tensors:
        name = tensor.name
        rows = [] if name in readers.companions else list(readers.rows(tensor))
        if not rows and (name in readers.companions or not tensor.is_weight):
            continue
        first, *others = rows or [readers.row("", tensor)]
        # Only in checkpoints is the name of a tensor a module path.
        module = first.module or ("" if "::" in name or "/" in name else name.rpartition(".")[0])
        sharing = dict.fromkeys(row.module for row in others if row.module not in ("", module))
        update = {"module": module, "shared_with": tuple(sharing)}
        found.append((tensor.identity, first.model_copy(update=update)))
    return tuple(found)


def module_precisions(weights: Iterable[Weight]) -> tuple[ModulePrecision, ...]:
    """One row per module and precision. A tensor shared by several graphs counts once."""
    once: dict[object, ModulePrecision] = {}
    for identity, row in weights:
        once.setdefault(identity, row)
    kinds: dict[tuple[object, ...], list[ModulePrecision]] = {}
    for row in once.values():
        kind = (row.module, row.precision, row.operator, row.block_size, row.zero_points, row.compute_dtype)
        kinds.setdefault(kind, []).append(row)
    return tuple(map(_sum, kinds.values()))


def _sum(rows: Sequence[ModulePrecision]) -> ModulePrecision:
    """One row for several of one module and precision."""
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("tensors", "parameters", "size_bytes")}
    shared = dict.fromkeys(module for row in rows for module in row.shared_with)
    return rows[0].model_copy(update={**sums, "shared_with": tuple(shared)})


class _Readers:
    """The nodes of a file by the tensors that they read."""

    def __init__(self, proto: onnx.ModelProto, stored: Mapping[str, TensorEntry]) -> None:
        self._stored = stored
        self._by_name: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        companions: set[str] = set()
        for node in all_nodes(proto.graph):
            for position, name in enumerate(node.input):
                if name:
                    self._by_name.setdefault(name, []).append((node, position))
            for inputs in QUANTISED[node.op_type].weights if node.op_type in QUANTISED else ():
                companions.update(_companions(node, inputs))
        for tensor in stored.values():
            companions.update(self._decoder(tensor)[1])
        self.companions = frozenset(companions)
        """Names of all scales, zero points and tables of quantised weights."""

    def row(self, module: str, tensor: TensorEntry, companions: Sequence[str] = (), **facts: Any) -> ModulePrecision:
        """The row of one weight. `companions`: names of its scales, zero points and table."""
        sizes = (self._stored[name].size_bytes for name in companions if name in self._stored)
        known: dict[str, Any] = {"precision": tensor.dtype, "parameters": tensor.elements, **facts}
        return ModulePrecision(module=module, tensors=1, size_bytes=tensor.size_bytes + sum(sizes), **known)

    def rows(self, tensor: TensorEntry) -> Iterator[ModulePrecision]:
        """One row per node that computes with a stored tensor; none if it is not a weight."""
        product, companions = self._decoder(tensor)
        if product is not None:
            blocks = self._stored[companions[0]].elements
            facts: dict[str, Any] = {
                "operator": "Gather" if tensor.dtype == TABLED else "Cast",
                "block_size": tensor.elements // blocks if blocks else None,
                "zero_points": False,
            }
            for node, _, computed in self._through(product.output[0], "float32"):
                yield self.row(_module(node) or _module(product), tensor, companions, compute_dtype=computed, **facts)
            return
        for node, position, computed in self._through(tensor.name):
            weights = QUANTISED[node.op_type].weights if node.op_type in QUANTISED else ()
            inputs = next((each for each in weights if each.weight == position), None)
            if inputs is not None:
                yield self._quantised(node, inputs, tensor)
            elif tensor.is_packed:
                yield self.row(_module(node), tensor, operator=node.op_type, block_size=0)
            elif tensor.is_weight:
                yield self.row(_module(node), tensor, compute_dtype="" if computed == tensor.dtype else computed)

    def _decoder(self, tensor: TensorEntry) -> tuple[onnx.NodeProto | None, tuple[str, ...]]:
        """The Mul that scales a tensor of codes, and the names of scales and table; None and () for other tensors."""
        tabled = tensor.dtype == TABLED
        if not tabled and not tensor.dtype.startswith(SMALL_FLOATS):
            return None, ()
        readers, table = list(self._through(tensor.name)), ""
        if tabled and readers and readers[0][0].op_type == "Gather" and readers[0][1] == 1:
            table = readers[0][0].input[0]
            readers = list(self._through(readers[0][0].output[0]))
        if not readers or readers[0][0].op_type != "Mul" or bool(table) is not tabled:
            return None, ()
        product, position, _ = readers[0]
        companions = tuple(filter(None, (product.input[1 - position], table)))
        known = all(companion in self._stored for companion in companions)
        return (product, companions) if known else (None, ())

    def _quantised(self, node: onnx.NodeProto, inputs: QuantisedInputs, tensor: TensorEntry) -> ModulePrecision:
        """The row of a quantised weight that `node` reads."""
        operator, attributes, module = QUANTISED[node.op_type], _integers(node), _module(node)
        if node.op_type == RESTORES and node.output:
            module = next((_module(user) for user, _, _ in self._through(node.output[0])), "") or module
        stored_bits = dtypes.bits_of(tensor.dtype) or 8
        bits = attributes.get("bits", attributes.get("expert_weight_bits", operator.bits)) if operator.bits else None
        precision = tensor.dtype  # of 8-bit and 4-bit floats
        if operator.kinds:
            kind = attributes.get("quant_type", 0)
            precision = operator.kinds[kind] if 0 <= kind < len(operator.kinds) else f"bnb type {kind}"
        elif tensor.dtype.removeprefix("u").startswith("int"):
            precision = f"int{bits if bits and stored_bits >= 8 else stored_bits}"
        parameters = tensor.elements * stored_bits // bits if bits and stored_bits >= 8 else tensor.elements
        if "K" in attributes and "N" in attributes:
            parameters = attributes["K"] * attributes["N"]
        return self.row(
            module,
            tensor,
            _companions(node, inputs),
            precision=precision,
            operator=node.op_type,
            block_size=0 if operator.block_size is None else attributes.get("block_size", operator.block_size),
            zero_points=bool(_input(node, inputs.zero_points)),
            parameters=parameters,
        )

    def _through(self, name: str, computed: str = "", depth: int = 0) -> Iterator[tuple[onnx.NodeProto, int, str]]:
        """Nodes that compute with a tensor after its carriers, with input position and the type it is cast to."""
        for node, position in self._by_name.get(name, ()):
            if node.op_type in CARRIERS and position == 0 and node.output and depth < DEEPEST:
                cast = dtypes.name_of(_integers(node).get("to", 0)) if node.op_type == "Cast" else computed
                behind = list(self._through(node.output[0], cast, depth + 1))
                yield from behind or [(node, position, cast)]
            else:
                yield node, position, computed


def _companions(node: onnx.NodeProto, inputs: QuantisedInputs) -> tuple[str, ...]:
    """Names of the scales and zero points of a quantised weight."""
    return tuple(filter(None, (_input(node, inputs.scales), _input(node, inputs.zero_points))))


def _input(node: onnx.NodeProto, position: int) -> str:
    """The name of an input; empty if the node has none at this position."""
    return node.input[position] if 0 <= position < len(node.input) else ""


def _integers(node: onnx.NodeProto) -> Mapping[str, int]:
    """Integer attributes of a node, by name."""
    return {attribute.name: attribute.i for attribute in node.attribute if attribute.HasField("i")}


def _module(node: onnx.NodeProto) -> str:
    """The module of a node; empty if unknown."""
    return graph_node(node).module or ""
