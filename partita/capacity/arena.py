"""ONNX Runtime's CPU arena: the memory that a sequence of allocations touches. Pure.

It is a best-fit allocator with coalescing (onnxruntime/core/framework/bfc_arena.cc): regions grow to the next power of
two, and a page becomes resident when a tensor is first placed on it. After the first run with a shape, ONNX Runtime
allocates all activations of a run as one block (memory patterns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

ROUNDING = 256
FIRST_REGION, SECOND_REGION = 1 << 20, 2 << 20
"""Least sizes of the first two regions."""
MOST_UNUSED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of a run: its bytes, and the first and the last node that use it."""

    size: int
    begin: int
    end: int


@dataclass(slots=True)
class Chunk:
    """A part of a region, from its offset to that of the next."""

    region: int
    offset: int
    size: int
    used: bool = False


@dataclass(slots=True)
class Arena:
    """The regions of an arena, and the bytes that were touched."""

    regions: list[list[Chunk]] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    growth: int = FIRST_REGION

    @property
    def resident(self) -> int:
        """Bytes that were ever in use."""
        return sum(self.touched)

    def allocate(self, size: int) -> Chunk:
        """Place a tensor in the smallest free chunk that holds it, in a new region if there is none.

        A chunk is split only if at least half of it, or `MOST_UNUSED_BYTES`, stays free.
        """
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        fitting = (chunk for chunks in self.regions for chunk in chunks if not chunk.used and chunk.size >= size)
        chunk = min(fitting, key=lambda each: (each.size, each.region, each.offset), default=None) or self._extend(size)
        if chunk.size >= 2 * size or chunk.size - size >= MOST_UNUSED_BYTES:
            chunks = self.regions[chunk.region]
            chunks.insert(chunks.index(chunk) + 1, Chunk(chunk.region, chunk.offset + size, chunk.size - size))
            chunk.size = size
        chunk.used = True
        self.touched[chunk.region] = max(self.touched[chunk.region], chunk.offset + size)
        return chunk

    def _extend(self, size: int) -> Chunk:
        """Add a region for a tensor; regions double in size."""
        doubles = self.growth >= size
        while self.growth < size:
            self.growth *= 2
        chunk = Chunk(len(self.regions), 0, self.growth)
        self.regions.append([chunk])
        self.touched.append(0)
        self.growth = SECOND_REGION if chunk.region == 0 else self.growth * (2 if doubles else 1)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Free a chunk, and join it with its free neighbours."""
        chunk.used = False
        joined: list[Chunk] = []
        for each in self.regions[chunk.region]:
            if joined and not joined[-1].used and not each.used:
                joined[-1].size += each.size
            else:
                joined.append(each)
        self.regions[chunk.region] = joined

    def run(self, blocks: Sequence[Block], scratch: Sequence[int], nodes: Sequence[int], *, planned: bool) -> None:
        """One run: its activations one by one, or `planned` as one block; temporary tensors within some `nodes`."""
        if planned:
            blocks, nodes = [Block(pattern_bytes(blocks), 0, 1)], nodes[:1] and (1,)
        steps = [(block.begin, False, block.size, block.end) for block in blocks if block.size]
        live: list[tuple[int, Chunk]] = []
        for begin, is_node, size, end in sorted([*steps, *((node, True, 0, 0) for node in nodes)]):
            for _, chunk in (ended := [entry for entry in live if entry[0] < begin]):
                self.free(chunk)
            live = [entry for entry in live if entry not in ended]
            if is_node:
                for chunk in [self.allocate(temporary) for temporary in scratch]:
                    self.free(chunk)
            else:
                live.append((end, self.allocate(size)))
        for _, chunk in live:
            self.free(chunk)


def pattern_bytes(blocks: Sequence[Block]) -> int:
    """Bytes of the activations that live at the same time."""
    changes = [(block.begin, 0, block.size) for block in blocks] + [(block.end, 1, -block.size) for block in blocks]
    return max(accumulate(size for _, _, size in sorted(changes)), default=0)
