"""Memory that a model needs at a context and batch size, and the largest settings that fit. Pure.

Activations are placed as by ONNX Runtime's CPU arena, a best-fit allocator with coalescing
(onnxruntime/core/framework/bfc_arena.cc): regions grow to the next power of two, and a page becomes resident when a
tensor is first placed on it. After the first run with a shape, ONNX Runtime allocates all activations of a run as one
block (memory patterns).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from partita import dtypes
from partita.capacity.costs import Block, GraphCosts, symbols
from partita.capacity.records import MemoryPart
from partita.package.contract import Contract, GraphFile

CHUNK_TOKENS = 512
"""Default maximum number of prompt tokens per run."""
NODE_BYTES = 61_000
"""Memory of a node in Partita and ONNX Runtime, without its weights; measured: packages of 84 and 304 nodes."""
PAGE_BYTES = 4096
LARGEST = 1 << 24
MOST_ROWS = 4096
ROUNDING = 256
FIRST_REGION, SECOND_REGION = 1 << 20, 2 << 20
"""Least sizes of the first two regions."""
MOST_UNUSED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the memory of a model depends on."""

    contract: Contract
    graphs: tuple[tuple[GraphFile, GraphCosts], ...]
    process_bytes: int = 0
    """Resident memory of a process without a model; 0 on a device of its own."""
    on_cpu: bool = True
    """The CPU provider packs the weights, and maps embeddings from the file."""
    naive_heads: int = 0
    """Attention heads of a layer if attention computes all scores at once."""
    query_heads: int = 0
    """Attention heads of a layer that is one operator."""

    def parts(self, context: int, batch: int) -> tuple[MemoryPart, ...]:
        """Memory by kind when `batch` rows are filled with `context` tokens."""
        sizes = {
            "process": self.process,
            "weights": self.weight_bytes(context * batch),
            "cache": self.cache(context, batch),
            "logits": 4 * batch * self.contract.vocab_size,
            "workspace": self.workspace(context, batch),
        }
        return tuple(
            MemoryPart(name=name, size_bytes=size, basis=BASIS[name, self.on_cpu])  # type: ignore[arg-type]
            for name, size in sizes.items()
            if size
        )

    def cache(self, context: int, batch: int) -> int:
        """Bytes of all states, for another context and batch size than those of the contract."""
        return sum(self.state_bytes(context, batch).values())

    def state_bytes(self, context: int, batch: int) -> dict[str, int]:
        """Bytes of each state, by the name of its past."""
        found = {}
        for state in self.contract.states:
            size = dtypes.size_bytes(state.dtype, state.shape) * batch // self.contract.batch_size
            grows = state.kind in ("key", "value") and not state.rolling
            found[state.past] = size * context // self.contract.max_length if grows else size
        return found

    def total(self, context: int, batch: int) -> int:
        """Peak memory in bytes."""
        return max(self.loading(), sum(part.size_bytes for part in self.parts(context, batch)))

    def weight_bytes(self, tokens: int) -> int:
        """Resident bytes of all weights after `tokens` different tokens."""
        own: dict[tuple[str, ...], int] = {}
        for _, costs in self.graphs:
            own |= {each.names: each.packed_bytes if self.on_cpu else each.stored_bytes for each in costs.products}
            if self.on_cpu:
                own |= {(*each.names, "kept"): each.kept_bytes for each in costs.products}
        products = {name for names in own for name in names}
        tables = {name: size for _, costs in self.graphs for name, size in costs.tables.items()}
        for name, size in tables.items():
            if not self.on_cpu or (name not in products and size):
                pages = size / PAGE_BYTES
                own[name,] = int(size * -math.expm1(-tokens / pages)) if self.on_cpu else size
            elif self.on_cpu:
                own[name, "table"] = size  # its pages were read for the product
        return sum(own.values()) + max(costs.constant_bytes for _, costs in self.graphs)

    def loading(self) -> int:
        """Memory at the end of loading, when packed weights and their mapped files are both resident."""
        if not self.on_cpu:
            return 0
        own = {each.names: each.packed_bytes + each.stored_bytes for _, costs in self.graphs for each in costs.products}
        return self.process + sum(own.values()) + max(costs.constant_bytes for _, costs in self.graphs)

    @property
    def process(self) -> int:
        """Memory of the process without weights."""
        nodes = sum(costs.nodes for _, costs in self.graphs)
        return self.process_bytes + NODE_BYTES * nodes if self.process_bytes else 0

    def workspace(self, context: int, batch: int) -> int:
        """Memory of ONNX Runtime's arena after a prompt and some steps."""
        total = 0
        for file, costs in self.graphs:
            arena = Arena()
            for tokens, times in self._runs(file, context):
                blocks = costs.blocks(symbols(self.contract, file, batch, tokens))
                for planned in (False, True)[:times]:
                    arena.run(blocks, self._scratch(batch, tokens), costs.attention_nodes, planned=planned)
            total += sum(arena.touched)
        return total

    def _runs(self, file: GraphFile, context: int) -> list[tuple[int, int]]:
        """Tokens and number of the runs of a graph."""
        if file.sequence_length is not None:
            return [(file.sequence_length, 2)]
        chunk = max(1, min(CHUNK_TOKENS, context - 1))
        times, rest = divmod(context - 1, chunk)
        prompt = [(chunk, times), *([(rest, 1)] if rest else [])] if file.phase != "decode" else []
        return [*prompt, *([(1, 2)] if file.phase != "prefill" else [])]

    def _scratch(self, batch: int, tokens: int) -> list[int]:
        """Temporary tensors of one attention node: transposed and rotated projections, scores, output."""
        state = next((state for state in self.contract.states if state.kind == "key"), None)
        if not self.on_cpu or not self.query_heads or state is None:
            return []
        width = 4 * batch * tokens * state.shape[-1]
        projections = width * (self.query_heads + 2 * state.shape[1])
        scores = 4 * batch * self.naive_heads * tokens * state.shape[2]
        return [projections, projections, *([scores, width * self.query_heads] if scores else [])]

    def largest_context(self, batch: int, available: int, limit: int | None) -> int:
        """The largest context that fits; 0 for none."""
        return _largest(lambda context: self.total(context, batch) <= available, limit or LARGEST)

    def largest_batch(self, context: int, available: int, limit: int | None) -> int:
        """The largest batch size that fits; 0 for none."""
        return _largest(lambda rows: self.total(context, rows) <= available, limit or MOST_ROWS)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, from below: the memory of a run does not grow with every token."""
    high = 1
    while high <= limit and fits(high):
        high *= 2
    numbers = range(high // 2 + 1, min(high, limit + 1))
    return high // 2 + bisect_left(numbers, True, key=lambda number: not fits(number))


BASIS = {
    ("process", True): "measured here: Python and ONNX Runtime without a model; and 61 kB per node",
    ("weights", True): "as the CPU kernels pack them; embeddings are mapped from the file",
    ("weights", False): "as the package stores them",
    **{("cache", on_cpu): "the states of the contract, filled" for on_cpu in (True, False)},
    **{("logits", on_cpu): "float32, one position per row" for on_cpu in (True, False)},
    ("workspace", True): "activations and attention scratch of a prompt chunk, as ONNX Runtime's arena places them",
    ("workspace", False): "activations of a prompt chunk, as ONNX Runtime's arena places them",
}


# Arena


class Chunk(NamedTuple):
    """A free or used part of a region."""

    size: int
    region: int
    offset: int


@dataclass(slots=True)
class Arena:
    """The free chunks of an arena, and the bytes of each region that were ever in use."""

    free: set[Chunk] = field(default_factory=set)
    touched: list[int] = field(default_factory=list)
    growth: int = FIRST_REGION

    def allocate(self, size: int) -> Chunk:
        """Place a tensor in the smallest free chunk that holds it, in a new region if there is none.

        A chunk is split only if at least half of it, or `MOST_UNUSED_BYTES`, stays free.
        """
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        chunk = min((each for each in self.free if each.size >= size), default=None) or self._extend(size)
        self.free.discard(chunk)
        self.touched[chunk.region] = max(self.touched[chunk.region], chunk.offset + size)
        if chunk.size < 2 * size and chunk.size - size < MOST_UNUSED_BYTES:
            return chunk
        self.free.add(Chunk(chunk.size - size, chunk.region, chunk.offset + size))
        return chunk._replace(size=size)

    def _extend(self, size: int) -> Chunk:
        """A new region for a tensor; regions double in size."""
        doubles = self.growth >= size
        while self.growth < size:
            self.growth *= 2
        chunk = Chunk(self.growth, len(self.touched), 0)
        self.touched.append(0)
        self.growth = SECOND_REGION if chunk.region == 0 else self.growth * (2 if doubles else 1)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Free a chunk, and join it with its free neighbours."""
        for other in [each for each in self.free if each.region == chunk.region]:
            if other.offset + other.size == chunk.offset or chunk.offset + chunk.size == other.offset:
                self.free.remove(other)
                chunk = Chunk(chunk.size + other.size, chunk.region, min(chunk.offset, other.offset))
        self.free.add(chunk)

    def run(self, blocks: Sequence[Block], scratch: Sequence[int], nodes: Sequence[int], *, planned: bool) -> None:
        """One run: its activations one by one, or `planned` as one block; temporary tensors within some `nodes`."""
        if planned:
            blocks, nodes = [Block(sum(block.size for block in blocks), 0, 1)], nodes[:1] and (1,)
        steps = [(block.begin, False, block.size, block.end) for block in blocks if block.size]
        live: list[tuple[int, Chunk]] = []
        for begin, is_node, size, end in sorted([*steps, *((node, True, 0, 0) for node in nodes)]):
            for entry in [entry for entry in live if entry[0] < begin]:
                live.remove(entry)
                self.release(entry[1])
            if is_node:
                for chunk in [self.allocate(temporary) for temporary in scratch]:
                    self.release(chunk)
            else:
                live.append((end, self.allocate(size)))
        for _, chunk in live:
            self.release(chunk)
