"""The precision of each module's weights, from the nodes that read them.

A weight belongs to the module of the node that computes with it, after nodes that only convert it (Cast, Transpose,
DequantizeLinear). Codes decoded by constant nodes (a Cast or Gather, and a Mul with scales) form one weight with their
scales. Without node metadata, a tensor name that is a module path gives the module.

Inputs and attributes of quantised operators follow onnx/docs/Operators.md and onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from partita import dtypes
from partita.inspection.records import ModulePrecision
from partita.runtime.place.model_file import all_nodes, graph_node, subgraphs_of

if TYPE_CHECKING:
    import onnx


CARRIERS = frozenset({"Cast", "Transpose", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand"})
"""Operators that pass a weight on, possibly in another type."""
RESTORES = "DequantizeLinear"
TABLED, SMALL_FLOATS = "uint4", "float8"
"""Types of codes that index a table, and of numeric codes."""
SMALL_ELEMENTS = 1024
"""Integer tensors with fewer elements are sizes, axes or indices, not weights."""
DEEPEST = 8
"""Maximum length of a chain of carriers; weights have two or three."""


class QuantisedInputs(NamedTuple):
    """Input positions of a quantised weight, its scales and its zero points. None or -1: no such input."""

    weight: int
    scales: int
    zero_points: int | None = None


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How an operator reads quantised weights."""

    weights: tuple[QuantisedInputs, ...]
    bits: str = ""
    """Attribute with the bits per weight; empty: given by the element type."""
    default_bits: int | None = None
    block: str = ""
    """Attribute with the block size; empty: one scale per row, column or tensor."""
    default_block: int = 0
    kinds: tuple[str, ...] = ()
    """Names of the values of the attribute `quant_type`, for non-integer weights."""


UNPACKING: Mapping[str, Unpacking] = {
    "MatMulNBits": Unpacking((QuantisedInputs(1, 2, 3),), "bits", 4, "block_size"),
    "MatMulBnb4": Unpacking((QuantisedInputs(1, 2),), "", 4, "block_size", kinds=("fp4", "nf4")),
    "GatherBlockQuantized": Unpacking((QuantisedInputs(0, 2, 3),), "bits", 4, "block_size", 128),
    "QMoE": Unpacking(
        (QuantisedInputs(2, 3, 11), QuantisedInputs(5, 6, 12), QuantisedInputs(8, 9, 13)),
        "expert_weight_bits",
        4,
        "block_size",
    ),
    RESTORES: Unpacking((QuantisedInputs(0, 1, 2),), block="block_size"),
    "MatMulIntegerToFloat": Unpacking((QuantisedInputs(1, 3, 5),)),
    "DynamicQuantizeMatMul": Unpacking((QuantisedInputs(1, 2, 3),)),
    "MatMulInteger": Unpacking((QuantisedInputs(1, -1, 3),)),
    "ConvInteger": Unpacking((QuantisedInputs(1, -1, 3),)),
    "QLinearMatMul": Unpacking((QuantisedInputs(3, 4, 5),)),
    "QLinearConv": Unpacking((QuantisedInputs(3, 4, 5),)),
    "QGemm": Unpacking((QuantisedInputs(3, 4, 5),)),
    "QAttention": Unpacking((QuantisedInputs(1, 4, 7),)),
}


@dataclass(frozen=True, slots=True)
class Use:
    """How a node reads a stored tensor."""

    module: str
    operator: str = ""
    precision: str = ""
    """Empty: given by the element type."""
    block_size: int | None = None
    zero_points: bool | None = None
    compute_dtype: str = ""
    parameters: int | None = None
    """Number of weights; None: its number of elements."""
    companions: tuple[str, ...] = ()
    """Names of its scales and zero points."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How constant nodes decode a weight of codes."""

    reads: str
    """The node that reads the codes: a Cast, or the Gather of their table."""
    product: onnx.NodeProto
    scales: str
    companions: tuple[str, ...]
    """Names of scales and table."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A stored tensor that is a weight, and its uses."""

    tensor: TensorEntry
    uses: tuple[Use, ...]
    """One per node that computes with it; at least one."""
    size_bytes: int
    """Including its scales and zero points."""


def weights_in(proto: onnx.ModelProto, tensors: Sequence[tuple[str, TensorEntry]]) -> tuple[Weight, ...]:
    """The weights among the stored `tensors` of a file, by tensor name."""
    named = dict(tensors)
    readers = _Readers(proto, named)
    companions = readers.companions()
    found = []
    for name, tensor in tensors:
        uses = tuple(readers.uses(name, tensor)) if name not in companions else ()
        if not uses and (name in companions or not _is_weight(tensor)):
            continue
        first, *others = uses or (Use(""),)
        scales = sum(named[other].size_bytes for other in first.companions if other in named)
        # Only in checkpoints is the name of a tensor a module path.
        module = first.module or ("" if "::" in name or "/" in name else name.rpartition(".")[0])
        found.append(Weight(tensor, (replace(first, module=module), *others), tensor.size_bytes + scales))
    return tuple(found)


def module_precisions(weights: Iterable[Weight]) -> tuple[ModulePrecision, ...]:
    """One row per module and precision. A tensor shared by several graphs counts once."""
    once: dict[object, Weight] = {}
    for weight in weights:
        once.setdefault(weight.tensor.identity, weight)
    rows: dict[ModulePrecision, list[Weight]] = {}
    for weight in once.values():
        precision = weight.uses[0].precision or weight.tensor.dtype
        row = ModulePrecision.copy_of(weight.uses[0], precision=precision, tensors=0, parameters=0, size_bytes=0)
        rows.setdefault(row, []).append(weight)
    return tuple(_counted(row, members) for row, members in rows.items())


def _counted(row: ModulePrecision, weights: Sequence[Weight]) -> ModulePrecision:
    """The row with the totals of its weights."""
    uses = [use.module for weight in weights for use in weight.uses[1:]]
    sizes = [(weight.uses[0].parameters, weight.tensor.elements) for weight in weights]
    counts = {
        "tensors": len(weights),
        "parameters": sum(elements if parameters is None else parameters for parameters, elements in sizes),
        "size_bytes": sum(weight.size_bytes for weight in weights),
        "shared_with": tuple(dict.fromkeys(module for module in uses if module not in ("", row.module))),
    }
    return row.model_copy(update=counts)


def _is_weight(tensor: TensorEntry) -> bool:
    """Whether a stored tensor is a weight, not a size or an index."""
    return tensor.elements > 1 if dtypes.is_float(tensor.dtype) else _is_packed(tensor)


def _is_packed(tensor: TensorEntry) -> bool:
    """Whether a tensor of integers is a quantised matrix."""
    bits = dtypes.bits_of(tensor.dtype)
    return bits is not None and bits <= 8 and tensor.dtype != "bool" and tensor.elements >= SMALL_ELEMENTS


class _Readers:
    """The nodes of a file by the tensors that they read."""

    def __init__(self, proto: onnx.ModelProto, stored: Mapping[str, TensorEntry]) -> None:
        self._stored = stored
        self._by_name: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in all_nodes(proto.graph):
            for position, name in enumerate(node.input):
                if name:
                    self._by_name.setdefault(name, []).append((node, position))

    def companions(self) -> frozenset[str]:
        """Names of all scales and zero points of quantised weights."""
        found: set[str] = set()
        for node, position in (reader for readers in self._by_name.values() for reader in readers):
            packed = _packed_at(node, position)
            found.update(() if packed is None else _companions(node, packed))
        for name, tensor in self._stored.items():
            decoding = self._decoding(name, tensor)
            found.update(() if decoding is None else decoding.companions)
        return frozenset(found)

    def _decoding(self, name: str, tensor: TensorEntry) -> _Decoding | None:
        """How nodes decode a tensor of codes; None for other tensors."""
        tabled = tensor.dtype == TABLED
        if not tabled and not tensor.dtype.startswith(SMALL_FLOATS):
            return None
        readers = list(self._through(name, "", 0))
        table = ""
        if tabled and readers and readers[0][0].op_type == "Gather" and readers[0][1] == 1:
            table = readers[0][0].input[0]
            readers = list(self._through(readers[0][0].output[0], "", 0))
        if not readers or readers[0][0].op_type != "Mul" or bool(table) is not tabled:
            return None
        product, position, _ = readers[0]
        scales = product.input[1 - position]
        companions = tuple(filter(None, (scales, table)))
        known = all(companion in self._stored for companion in companions)
        return _Decoding("Gather" if tabled else "Cast", product, scales, companions) if known else None

    def uses(self, name: str, tensor: TensorEntry) -> Iterator[Use]:
        """One use per node that computes with a stored tensor; none if it is not a weight."""
        decoding = self._decoding(name, tensor)
        if decoding is not None:
            blocks = self._stored[decoding.scales].elements
            for node, _, computed in self._through(decoding.product.output[0], "float32", 0):
                yield Use(
                    _module(node) or _module(decoding.product),
                    operator=decoding.reads,
                    block_size=tensor.elements // blocks if blocks else None,
                    zero_points=False,
                    compute_dtype=computed,
                    companions=decoding.companions,
                )
            return
        for node, position, computed in self._through(name, "", 0):
            packed = _packed_at(node, position)
            if packed is not None:
                yield self._unpacked(node, packed, tensor)
            elif _is_packed(tensor):
                yield Use(_module(node), operator=node.op_type, block_size=0)
            elif _is_weight(tensor):
                yield Use(_module(node), compute_dtype="" if computed == tensor.dtype else computed)

    def _unpacked(self, node: onnx.NodeProto, packed: QuantisedInputs, tensor: TensorEntry) -> Use:
        """The use of a quantised weight by `node`."""
        how, attributes, module = UNPACKING[node.op_type], _integers(node), _module(node)
        if node.op_type == RESTORES and node.output:
            module = next((_module(user) for user, _, _ in self._through(node.output[0], "", 0)), "") or module
        return Use(
            module=module,
            operator=node.op_type,
            precision=_precision(how, attributes, tensor.dtype),
            block_size=attributes.get(how.block, how.default_block) if how.block else 0,
            zero_points=bool(_input(node, packed.zero_points)),
            parameters=_parameters(how, attributes, tensor),
            companions=_companions(node, packed),
        )

    def _through(self, name: str, computed: str, depth: int) -> Iterator[tuple[onnx.NodeProto, int, str]]:
        """Nodes that compute with a tensor after its carriers, with input position and the type it is cast to."""
        for node, position in self._by_name.get(name, ()):
            if node.op_type in CARRIERS and position == 0 and node.output and depth < DEEPEST:
                cast = dtypes.name_of(_integers(node).get("to", 0)) if node.op_type == "Cast" else computed
                behind = list(self._through(node.output[0], cast, depth + 1))
                yield from behind or [(node, position, cast)]
            else:
                yield node, position, computed


def _packed_at(node: onnx.NodeProto, position: int) -> QuantisedInputs | None:
    """The quantised weight at an input of a node; None for another input."""
    how = UNPACKING.get(node.op_type)
    return None if how is None else next((each for each in how.weights if each.weight == position), None)


def _companions(node: onnx.NodeProto, packed: QuantisedInputs) -> tuple[str, ...]:
    """Names of the scales and zero points of a quantised weight."""
    return tuple(filter(None, (_input(node, packed.scales), _input(node, packed.zero_points))))


def _input(node: onnx.NodeProto, position: int | None) -> str:
    """The name of an input; empty if the node has none at this position."""
    return node.input[position] if position is not None and 0 <= position < len(node.input) else ""


def _integers(node: onnx.NodeProto) -> Mapping[str, int]:
    """Integer attributes of a node, by name."""
    return {attribute.name: attribute.i for attribute in node.attribute if attribute.HasField("i")}


def _parameters(how: Unpacking, attributes: Mapping[str, int], tensor: TensorEntry) -> int:
    """Number of weights in a quantised tensor."""
    if "K" in attributes and "N" in attributes:
        return attributes["K"] * attributes["N"]
    stored_bits = dtypes.bits_of(tensor.dtype) or 8
    bits = attributes.get(how.bits, how.default_bits) if how.bits else stored_bits
    return tensor.elements * stored_bits // bits if bits and stored_bits >= 8 else tensor.elements


def _precision(how: Unpacking, attributes: Mapping[str, int], dtype: str) -> str:
    """Name of the precision, e.g. int4 or nf4. `dtype`: of the tensor with the weights."""
    if how.kinds:
        kind = attributes.get("quant_type", 0)
        return how.kinds[kind] if 0 <= kind < len(how.kinds) else f"bnb type {kind}"
    if not dtype.removeprefix("u").startswith("int"):
        return dtype  # 8-bit or 4-bit float
    own = dtypes.bits_of(dtype)
    bits = attributes.get(how.bits, how.default_bits) if how.bits else None
    return f"int{own if bits is None or (own or 8) < 8 else bits}"


def _module(node: onnx.NodeProto) -> str:
    """The module of a node; empty if unknown."""
    return graph_node(node).module or ""


UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor, without its values."""

    name: str
    dtype: str
    """Element type; `unknown` for a number that ONNX does not define."""
    shape: tuple[int, ...]
    size_bytes: int
    """0 for strings."""
    file: str
    """The ONNX file, or the external data file with the values."""
    identity: tuple[object, ...]
    """Equal for tensors of the same bytes in the same file."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def stored_tensor(tensor: onnx.TensorProto, file: str) -> TensorEntry:
    """A tensor of the ONNX file `file`."""
    shape = tuple(max(size, 0) for size in tensor.dims)
    dtype = dtypes.name_of(tensor.data_type) or UNKNOWN
    size = dtypes.size_bytes(dtype, shape) if dtypes.bits_of(dtype) is not None else 0
    outside = {entry.key: entry.value for entry in tensor.external_data}
    if "location" not in outside:
        return TensorEntry(tensor.name, dtype, shape, size, file, (file, tensor.name))
    data = external_file(file, outside["location"])
    return TensorEntry(tensor.name, dtype, shape, size, data, (data, outside.get("offset", "0"), size))


def external_file(file: str, location: str) -> str:
    """The path of an external data file of the ONNX file `file`, relative to the folder that `file` is relative to."""
    return str(PurePosixPath(file).parent / location)


def initializers(graph: onnx.GraphProto, file: str, scope: str = "") -> Iterator[tuple[str, TensorEntry]]:
    """Stored tensors of a graph and its subgraphs, by name."""
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name, _scoped(stored_tensor(tensor, file), scope)
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield node.output[0], _scoped(stored_tensor(attribute.t, file), f"{scope}{node.output[0]}")
        for number, body in enumerate(subgraphs_of(node)):
            yield from initializers(body, file, f"{scope}{node.name}[{number}]/")


def _scoped(tensor: TensorEntry, scope: str) -> TensorEntry:
    """The tensor with a unique location, for graphs of one file with tensors of the same name."""
    if not scope or tensor.identity != (tensor.file, tensor.name):
        return tensor
    return replace(tensor, identity=(tensor.file, scope, tensor.name))
