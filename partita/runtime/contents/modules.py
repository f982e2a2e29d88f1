"""Which module keeps its weights in which precision, told from the nodes that read them.

A weight belongs to the module of the node that computes with it; Cast, Transpose and their like are looked through, and
so is DequantizeLinear. Small codes of which constant nodes make numbers (a Cast, or a Gather of their table, and a
product with scales) are one weight with these. Where nodes tell no module, the name of a tensor does, if it is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from partita import dtypes
from partita.inspection.records import ModulePrecision
from partita.runtime.contents.packing import UNPACKING, Packed, Unpacking, precision_of
from partita.runtime.contents.tensors import Stored
from partita.runtime.model_file import all_nodes, graph_node

if TYPE_CHECKING:
    import onnx

CARRIERS = frozenset({"Cast", "Transpose", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand"})
"""Operators that hand a weight on as it is, or in another type."""
RESTORES = "DequantizeLinear"
TABLED, SMALL_FLOATS = "uint4", "float8"
"""Types of codes that are places in a table, and of codes that are numbers."""
SMALL_ELEMENTS = 1024
"""Fewer integers than this are sizes, axes and indices, and no weights."""
DEEPEST = 8
"""Carriers behind each other; weights have two or three."""


@dataclass(frozen=True, slots=True)
class Use:
    """How a stored tensor is read."""

    module: str
    packed: str = ""
    precision: str = ""
    """Empty: the element type."""
    block_size: int | None = None
    zero_points: bool | None = None
    computed: str = ""
    parameters: int | None = None
    """None: as many as it has elements."""
    companions: tuple[str, ...] = ()
    """Names of its scales and zero points."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How constant nodes make the numbers of a weight of small codes."""

    reads: str
    """The operator that reads the codes: a Cast, or the Gather of their table."""
    product: onnx.NodeProto
    scales: str
    table: str
    """Names of stored tensors; of the table empty where codes are numbers themselves."""


@dataclass(slots=True)
class _Row:
    """What is summed up for one row."""

    tensors: int = 0
    parameters: int = 0
    size_bytes: int = 0
    shared_with: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weight:
    """A stored tensor that is a weight, and how it is read."""

    tensor: Stored
    uses: tuple[Use, ...]
    """Once for each node that computes with it, the first first; of one that nothing reads, one that says so."""
    size_bytes: int
    """With its scales and zero points."""


def weights_in(proto: onnx.ModelProto, tensors: Sequence[tuple[str, Stored]]) -> tuple[Weight, ...]:
    """The weights among the stored `tensors` of a file, by the names that nodes have for them."""
    named = dict(tensors)
    readers = _Readers(proto, named)
    companions = readers.companions()
    found = []
    for name, tensor in tensors:
        uses = tuple(readers.uses(name, tensor)) if name not in companions else ()
        if not uses and (name in companions or not _is_weight(tensor)):
            continue
        uses = uses or (Use(""),)
        beside = sum(named[other].size_bytes for other in uses[0].companions if other in named)
        module = uses[0].module or _path_in(name)
        found.append(Weight(tensor, (replace(uses[0], module=module), *uses[1:]), tensor.size_bytes + beside))
    return tuple(found)


def module_precisions(weights: Iterable[Weight]) -> tuple[ModulePrecision, ...]:
    """A row for each way in which a module keeps weights; what several graphs share counts once."""
    rows: dict[tuple[str, str, str, int | None, bool | None, str], _Row] = {}
    seen: set[object] = set()
    for weight in weights:
        tensor, (first, *others) = weight.tensor, weight.uses
        if tensor.place in seen:
            continue
        seen.add(tensor.place)
        precision = first.precision or tensor.dtype
        key = (first.module, precision, first.packed, first.block_size, first.zero_points, first.computed)
        row = rows.setdefault(key, _Row())
        row.tensors += 1
        row.parameters += tensor.elements if first.parameters is None else first.parameters
        row.size_bytes += weight.size_bytes
        row.shared_with |= dict.fromkeys(use.module for use in others if use.module not in ("", first.module))
    return tuple(_record(key, row) for key, row in rows.items())


def _record(key: tuple[str, str, str, int | None, bool | None, str], row: _Row) -> ModulePrecision:
    module, precision, packed, block_size, zero_points, computed = key
    return ModulePrecision(
        module=module,
        precision=precision,
        packed=packed,
        block_size=block_size,
        zero_points=zero_points,
        computed=computed,
        tensors=row.tensors,
        parameters=row.parameters,
        size_bytes=row.size_bytes,
        shared_with=tuple(row.shared_with),
    )


def _is_weight(tensor: Stored) -> bool:
    """Whether a stored tensor is one of the model's numbers, and no size or index."""
    if dtypes.is_float(tensor.dtype):
        return tensor.elements > 1
    return _is_packed(tensor)


def _is_packed(tensor: Stored) -> bool:
    """Whether a tensor of integers is what a matrix was rounded to."""
    bits = dtypes.bits_of(tensor.dtype)
    return bits is not None and bits <= 8 and tensor.dtype != "bool" and tensor.elements >= SMALL_ELEMENTS


def _path_in(name: str) -> str:
    """The module in the name of a tensor, as checkpoints have it; empty where it is no path."""
    if "::" in name or "/" in name:
        return ""
    return name.rpartition(".")[0]


class _Readers:
    """The nodes of a file by what they read."""

    def __init__(self, proto: onnx.ModelProto, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._by_name: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in all_nodes(proto.graph):
            for position, name in enumerate(node.input):
                if name:
                    self._by_name.setdefault(name, []).append((node, position))

    def companions(self) -> frozenset[str]:
        """Names of all scales and zero points that belong to a packed weight."""
        found: set[str] = set()
        for readers in self._by_name.values():
            for node, position in readers:
                packed = _packed_at(node, position)
                if packed is not None:
                    found |= set(_companions(node, packed))
        for name, tensor in self._stored.items():
            decoding = self._decoding(name, tensor)
            found |= {decoding.scales, decoding.table} - {""} if decoding is not None else set()
        return frozenset(found)

    def _decoding(self, name: str, tensor: Stored) -> _Decoding | None:
        """How a tensor of codes is made numbers of; None where it is none, or read in another way."""
        if tensor.dtype != TABLED and not tensor.dtype.startswith(SMALL_FLOATS):
            return None
        reads, table = "Cast", ""
        readers = list(self._through(name, "", 0))
        if tensor.dtype == TABLED and readers and readers[0][0].op_type == "Gather" and readers[0][1] == 1:
            reads, table = "Gather", readers[0][0].input[0]
            readers = list(self._through(readers[0][0].output[0], "", 0))
        if not readers or readers[0][0].op_type != "Mul" or bool(table) is not (tensor.dtype == TABLED):
            return None
        product, position, _ = readers[0]
        scales = product.input[1 - position]
        stored = scales in self._stored and (not table or table in self._stored)
        return _Decoding(reads, product, scales, table) if stored else None

    def uses(self, name: str, tensor: Stored) -> Iterator[Use]:
        """How a stored tensor is read, once for each node that computes with it; nothing for what is no weight."""
        decoding = self._decoding(name, tensor)
        if decoding is not None:
            blocks = self._stored[decoding.scales].elements
            companions = tuple(filter(None, (decoding.scales, decoding.table)))
            for node, _, computed in self._through(decoding.product.output[0], "float32", 0):
                yield Use(
                    _module(node) or _module(decoding.product),
                    packed=decoding.reads,
                    block_size=tensor.elements // blocks if blocks else None,
                    zero_points=False,
                    computed=computed,
                    companions=companions,
                )
            return
        for node, position, computed in self._through(name, "", 0):
            packed = _packed_at(node, position)
            if packed is not None:
                yield self._unpacked(node, packed, tensor)
            elif _is_packed(tensor):
                yield Use(_module(node), packed=node.op_type, block_size=0)
            elif _is_weight(tensor):
                yield Use(_module(node), computed="" if computed == tensor.dtype else computed)

    def _unpacked(self, node: onnx.NodeProto, packed: Packed, tensor: Stored) -> Use:
        """A weight that `node` unpacks."""
        how = UNPACKING[node.op_type]
        attributes = _integers(node)
        module = _module(node)
        if node.op_type == RESTORES and node.output:
            module = next((_module(user) for user, _, _ in self._through(node.output[0], "", 0)), "") or module
        zero_points = _input(node, packed.zero_points)
        return Use(
            module=module,
            packed=node.op_type,
            precision=precision_of(how, attributes, tensor.dtype),
            block_size=attributes.get(how.block, how.default_block) if how.block else 0,
            zero_points=bool(zero_points),
            parameters=_parameters(how, attributes, tensor),
            companions=_companions(node, packed),
        )

    def _through(self, name: str, computed: str, depth: int) -> Iterator[tuple[onnx.NodeProto, int, str]]:
        """Nodes that compute with a tensor, behind those that hand it on; and the type that it was cast to."""
        for node, position in self._by_name.get(name, ()):
            if node.op_type in CARRIERS and position == 0 and node.output and depth < DEEPEST:
                cast = _cast_to(node) if node.op_type == "Cast" else computed
                behind = list(self._through(node.output[0], cast, depth + 1))
                yield from behind or [(node, position, cast)]
            else:
                yield node, position, computed


def _packed_at(node: onnx.NodeProto, position: int) -> Packed | None:
    """The packed weight that an input of a node is; None where it is something else."""
    how = UNPACKING.get(node.op_type)
    return None if how is None else next((each for each in how.weights if each.weight == position), None)


def _companions(node: onnx.NodeProto, packed: Packed) -> tuple[str, ...]:
    """Names of the scales and zero points of a packed weight."""
    return tuple(filter(None, (_input(node, packed.scales), _input(node, packed.zero_points))))


def _input(node: onnx.NodeProto, position: int | None) -> str:
    """The name of an input; empty where it has none."""
    return node.input[position] if position is not None and 0 <= position < len(node.input) else ""


def _integers(node: onnx.NodeProto) -> Mapping[str, int]:
    """Attributes of a node that are one integer."""
    return {attribute.name: attribute.i for attribute in node.attribute if attribute.HasField("i")}


def _parameters(how: Unpacking, attributes: Mapping[str, int], tensor: Stored) -> int:
    """How many weights a packed tensor holds."""
    if "K" in attributes and "N" in attributes:
        return attributes["K"] * attributes["N"]
    stored_bits = dtypes.bits_of(tensor.dtype) or 8
    bits = attributes.get(how.bits, how.default_bits) if how.bits else stored_bits
    return tensor.elements * stored_bits // bits if bits and stored_bits >= 8 else tensor.elements


def _cast_to(node: onnx.NodeProto) -> str:
    """The type that a Cast gives."""
    try:
        return dtypes.numbered(_integers(node).get("to", 0)).name
    except ValueError:
        return ""


def _module(node: onnx.NodeProto) -> str:
    """The module of a node; empty where it tells none."""
    return graph_node(node).module or ""
