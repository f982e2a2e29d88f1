"""Memory that a model needs at a context and batch size, and the largest settings that fit. Pure.

Activations: the arena of ONNX Runtime's CPU provider (onnxruntime/core/framework/bfc_arena.cc) keeps its memory. The
first run with a shape allocates each activation, later runs allocate all as one block (memory patterns).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
            single = planned = 0
            for tokens, times in self._runs(file, context):
                blocks = costs.blocks(symbols(self.contract, file, batch, tokens))
                scratch = self._scratch(batch, tokens)
                single = max(single, live_bytes([*blocks, *(Block(scratch, at, at) for at in costs.attention_nodes)]))
                planned = max(planned, live_bytes(blocks) if times > 1 else 0)
            total += single + planned
        return total

    def _runs(self, file: GraphFile, context: int) -> list[tuple[int, int]]:
        """Tokens and number of the runs of a graph."""
        if file.sequence_length is not None:
            return [(file.sequence_length, 2)]
        chunk = max(1, min(CHUNK_TOKENS, context - 1))
        times, rest = divmod(context - 1, chunk)
        prompt = [(chunk, times), *([(rest, 1)] if rest else [])] if file.phase != "decode" else []
        return [*prompt, *([(1, 2)] if file.phase != "prefill" else [])]

    def _scratch(self, batch: int, tokens: int) -> int:
        """Bytes of the temporary tensors of one attention node: transposed and rotated projections, scores, output."""
        state = next((state for state in self.contract.states if state.kind == "key"), None)
        if not self.on_cpu or not self.query_heads or state is None:
            return 0
        width = 4 * batch * tokens * state.shape[-1]
        projections = width * (self.query_heads + 2 * state.shape[1])
        scores = 4 * batch * self.naive_heads * tokens * state.shape[2]
        return 2 * projections + (scores + width * self.query_heads if scores else 0)

    def largest_context(self, batch: int, available: int, limit: int | None) -> int:
        """The largest context that fits; 0 for none."""
        return bisect_left(
            range(1, (limit or LARGEST) + 1), True, key=lambda context: self.total(context, batch) > available
        )

    def largest_batch(self, context: int, available: int, limit: int | None) -> int:
        """The largest batch size that fits; 0 for none."""
        return bisect_left(
            range(1, (limit or MOST_ROWS) + 1), True, key=lambda rows: self.total(context, rows) > available
        )


BASIS = {
    ("process", True): "measured here: Python and ONNX Runtime without a model; and 61 kB per node",
    ("weights", True): "as the CPU kernels pack them; embeddings are mapped from the file",
    ("weights", False): "as the package stores them",
    **{("cache", on_cpu): "the states of the contract, filled" for on_cpu in (True, False)},
    **{("logits", on_cpu): "float32, one position per row" for on_cpu in (True, False)},
    ("workspace", True): "activations and attention scratch of a prompt chunk, which ONNX Runtime's arena keeps",
    ("workspace", False): "activations of a prompt chunk, which ONNX Runtime's arena keeps",
}


def live_bytes(blocks: Sequence[Block]) -> int:
    """Bytes of the tensors that live at the same time."""
    changes = [(block.begin, 0, block.size) for block in blocks] + [(block.end, 1, -block.size) for block in blocks]
    return max(accumulate(size for _, _, size in sorted(changes)), default=0)
