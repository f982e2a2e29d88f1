"""Weights, arithmetic and activations of a graph, read from its operators and shapes. Pure.

Sizes of packed weights are those of ONNX Runtime's CPU kernels (onnxruntime/core/mlas/lib: qnbitgemm.h, sgemm.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from partita import dtypes

if TYPE_CHECKING:
    import onnx

    from partita.package.contract import Contract, GraphFile

PACKED_COLUMNS = 16
"""Columns of a packed matrix are padded to a multiple of this."""
BLOCK_FLOATS = 2
"""float32 numbers that a packed block of integers has: its scale and its sum."""
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators whose output shares the memory of their first input."""
PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul"})
LOOK_UPS = frozenset({"Gather", "GatherBlockQuantized"})
ATTENTIONS = frozenset({"GroupQueryAttention", "MultiHeadAttention", "Attention"})
ROWS = "*"
"""Key of the factor for a graph with a fixed batch size, in sizes."""
SMALL_BYTES = 256
"""Smaller tensors are not counted: shapes and counters."""

Sizes = Mapping[str, int]
"""Name of a symbolic dimension -> its size."""
Shape = tuple[str, tuple[int | str, ...]]
"""Element type and sizes."""


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of a run: its bytes, and the first and the last node that use it."""

    size: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a constant matrix [K, N]."""

    node: str
    form: str
    """float32, float16, int8 or int4."""
    stored_bytes: int
    packed_bytes: int
    """Bytes that the CPU kernel reads."""
    kept_bytes: int
    """Bytes of the file that stay mapped: scales and zero points."""
    flops: int
    """Per row of activations."""
    of_head: bool
    """It runs only on positions whose logits are needed."""
    names: tuple[str, ...]
    """Its initializers."""


@dataclass(slots=True)
class GraphCosts:
    """The costs of one graph."""

    products: list[Product] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)
    """Initializers of embeddings, of which one row is read per token -> bytes."""
    constant_bytes: int = 0
    """Other constants."""
    nodes: int = 0
    attention_flops: dict[str, int] = field(default_factory=dict)
    """Node -> arithmetic per new token and cached token, both products."""
    attention_nodes: list[int] = field(default_factory=list)
    """Their indices."""
    state_readers: dict[str, str] = field(default_factory=dict)
    """Past state -> the first node that reads it."""
    activations: list[tuple[Shape, int, int]] = field(default_factory=list)
    """Type and shape of each activation, and the first and the last node that uses it."""
    unknown_shapes: int = 0
    """Activations without a shape in the file, which are not counted."""

    def blocks(self, sizes: Sizes) -> list[Block]:
        """Memory of the activations of a run, in the order of allocation."""
        buffers: dict[Shape, list[Block]] = {}
        for shape, begin, end in self.activations:
            # ONNX Runtime's plan keeps a buffer for later activations of the same type and shape
            own = buffers.setdefault(shape, [])
            free = next((at for at, block in enumerate(own) if block.end < begin), None)
            if free is None:
                own.append(Block(sizes.get(ROWS, 1) * _bytes(*shape, sizes), begin, end))
            else:
                own[free] = replace(own[free], end=end)
        found = (block for own in buffers.values() for block in own if block.size > SMALL_BYTES)
        return sorted(found, key=lambda block: block.begin)

    def written_bytes(self, sizes: Sizes) -> int:
        """Bytes of all activations of a run."""
        return sizes.get(ROWS, 1) * sum(_bytes(*shape, sizes) for shape, _, _ in self.activations)


def symbols(contract: Contract, file: GraphFile, rows: int, tokens: int) -> dict[str, int]:
    """The sizes of a run of `rows` rows with `tokens` new tokens each, and logits of one position."""
    fixed = next((port.shape[0] for port in file.inputs if port.role == "tokens"), 1)
    found = {ROWS: -(-rows // fixed) if isinstance(fixed, int) and fixed else 1}
    by_role = {"tokens": (rows, tokens), "logits_rows": (1,), "logits": (rows, 1), "mask": (rows, contract.max_length)}
    for port in (*file.inputs, *file.outputs):
        for name, size in zip(port.shape, by_role.get(port.role, ()), strict=False):
            if isinstance(name, str):
                found.setdefault(name, size)
    return found


def graph_costs(model: onnx.ModelProto, contract: Contract, file: GraphFile) -> GraphCosts:
    """The costs of a graph whose weights need not be present. Nodes in control-flow subgraphs are not counted."""
    graph, found = model.graph, GraphCosts()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {value.name: _shape(value) for value in (*graph.value_info, *graph.output, *graph.input)}
    kept = {port.name for port in (*file.inputs, *file.outputs)}
    pasts = {state.past for state in contract.states}
    kept |= pasts | {state.present for state in contract.states}
    rows = {port.name for port in file.inputs if port.role in ("logits_rows", "logits_count")}
    used: set[str] = set()
    head: set[str] = set()
    source: dict[str, str] = {}
    last: dict[str, int] = {}
    made: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        found.nodes += 1
        inputs = [name for name in node.input if name]
        of_head = any(name in head or name in rows for name in inputs)
        head.update(node.output if of_head else ())
        product = _product(node, constants, of_head=of_head)
        if product is not None:
            found.products.append(product)
            used.update(product.names)
        elif node.op_type in LOOK_UPS and len(getattr(constants.get(inputs[0]), "dims", ())) > 1:
            found.tables |= {name: _stored(constants[name]) for name in inputs if name in constants}
            used.update(found.tables)
        if attention := _attention_flops(node, contract):
            found.attention_nodes.append(index)
            found.attention_flops[node.name] = attention
        for name in inputs:
            if name in pasts:
                found.state_readers.setdefault(name, node.name)
            last[source.get(name, name)] = index
        for name in filter(None, node.output):
            if node.op_type in VIEWS and inputs:
                source[name] = source.get(inputs[0], inputs[0])
            elif name not in kept:
                made[name] = index
    for name, index in made.items():
        if (shape := shapes.get(name)) is not None:
            found.activations.append((shape, index, last.get(name, index)))
        else:
            found.unknown_shapes += name in last
    found.constant_bytes = sum(_stored(tensor) for name, tensor in constants.items() if name not in used)
    return found


def _product(node: onnx.NodeProto, constants: Mapping[str, Any], *, of_head: bool) -> Product | None:
    """The product of a node with a constant matrix; None for other nodes."""
    names = tuple(name for name in node.input if name in constants)
    matrix = constants.get(node.input[1]) if len(node.input) > 1 else None
    if matrix is None or node.op_type not in PRODUCTS:
        return None
    stored = sum(_stored(constants[name]) for name in names)
    if node.op_type == "MatMulNBits":
        given = {entry.name: entry.i for entry in node.attribute}
        width, columns, bits = given["K"], given["N"], given.get("bits", 4)
        packed = packed_bytes(width, columns, bits, given["block_size"])
        kept = stored - _stored(matrix)
        return Product(node.name, f"int{bits}", stored, packed, kept, 2 * width * columns, of_head, names)
    if len(matrix.dims) != 2:
        return None
    dtype = dtypes.name_of(matrix.data_type)
    columns, width = sorted(matrix.dims, reverse=True)
    item = 1 if dtypes.dtype_named(dtype).bits == 8 else 4  # float16 is converted to float32
    return Product(node.name, dtype, stored, item * width * _padded(columns), 0, 2 * width * columns, of_head, names)


def packed_bytes(width: int, columns: int, bits: int, block_size: int) -> int:
    """Bytes of a matrix [width, columns] of integers as the CPU kernel reads it."""
    blocks = -(-width // block_size)
    return columns * blocks * block_size * bits // 8 + 4 * BLOCK_FLOATS * blocks * _padded(columns)


def _padded(columns: int) -> int:
    return -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS


def _attention_flops(node: onnx.NodeProto, contract: Contract) -> int:
    """Arithmetic of an attention node for one new and one cached token, of the keys and the values."""
    heads = {entry.name: entry.i for entry in node.attribute}
    count = heads.get("num_heads") or heads.get("q_num_heads")
    past = next((state for state in contract.states if state.past in node.input), None)
    if node.op_type not in ATTENTIONS or past is None or not past.shape:
        return 0
    return 4 * int(count or past.shape[1]) * past.shape[-1]


def _stored(tensor: onnx.TensorProto) -> int:
    """Bytes of a constant in the file."""
    return dtypes.size_bytes(dtypes.name_of(tensor.data_type), tensor.dims)


def _shape(value: onnx.ValueInfoProto) -> Shape | None:
    """Element type and sizes; None if they are not in the file."""
    kind = value.type.tensor_type
    dtype = dtypes.name_of(kind.elem_type)
    if not kind.HasField("shape") or not dtype or dtypes.bits_of(dtype) is None:
        return None
    return dtype, tuple(size.dim_param or size.dim_value for size in kind.shape.dim)


def _bytes(dtype: str, shape: tuple[int | str, ...], sizes: Sizes) -> int:
    """Bytes of an activation; a size that is not known counts 1."""
    return dtypes.size_bytes(dtype, [size if isinstance(size, int) else sizes.get(size, 1) for size in shape])
