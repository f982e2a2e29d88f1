"""llama.cpp's parallel mode: sequences of one context, a token of each in a batch, prompts beside them in the same.

As its server and `llama-parallel` do it: a sequence that has ended makes room for the next prompt at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.batching import timed_batch
from benchmarks.peers.children.llama import BATCH, import_binding
from benchmarks.peers.children.serving import Open, Opened, best, serve


@dataclass(slots=True)
class _Sequence:
    """A prompt at work."""

    index: int
    prompt: list[int]
    wanted: int
    read: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        """Tokens to be read next: what is left of the prompt, or the last new one."""
        return self.prompt[self.read :] or self.tokens[-1:]


class Llama:
    """A model, and a context for each number of sequences that is asked for."""

    def __init__(self, binding: Any, file: Path, threads: int, length: int) -> None:
        self.binding, self.threads, self.length = binding, threads, length
        self.model = binding.llama_model_load_from_file(str(file).encode(), binding.llama_model_default_params())
        if not self.model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        self.vocab = int(binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(self.model)))
        self.context: Any = None
        self.rows = 0
        self.batch = binding.llama_batch_init(BATCH, 0, 1)

    def open(self, rows: int) -> None:
        """A context of `rows` sequences, each of the whole length."""
        if self.rows != rows:
            if self.context:
                self.binding.llama_free(self.context)
            wanted = self.binding.llama_context_default_params()
            wanted.n_seq_max, wanted.n_ctx = rows, rows * max(self.length, 32)
            wanted.n_batch = min(wanted.n_ctx, BATCH)
            wanted.n_threads = wanted.n_threads_batch = self.threads
            wanted.no_perf = True
            self.context, self.rows = self.binding.llama_init_from_model(self.model, wanted), rows
            if not self.context:
                raise ValueError(f"llama.cpp cannot make a context of {rows} sequences")
        self.binding.llama_memory_clear(self.binding.llama_get_memory(self.context), False)

    def answer(self, prompts: list[list[int]], new_tokens: list[int], rows: int) -> list[list[int]]:
        """See Batches."""
        self.open(rows)
        found: list[list[int]] = [[] for _ in prompts]
        waiting = [_Sequence(index, prompt, new_tokens[index]) for index, prompt in enumerate(prompts)][::-1]
        slots: list[_Sequence | None] = [None] * rows
        memory = self.binding.llama_get_memory(self.context)
        while waiting or any(slots):
            for slot in range(rows):
                if slots[slot] is None and waiting:
                    slots[slot] = waiting.pop()
            for slot in self.step(slots):
                entry = slots[slot]
                if entry is not None and len(entry.tokens) == entry.wanted:
                    found[entry.index], slots[slot] = entry.tokens, None
                    self.binding.llama_memory_seq_rm(memory, slot, -1, -1)
        return found

    def step(self, slots: list[_Sequence | None]) -> list[int]:
        """One batch: first a token of each sequence that generates, then prompts as far as there is room. Returns the
        slots that got a token.
        """
        count, last = 0, {}
        order = sorted(
            (slot for slot, entry in enumerate(slots) if entry), key=lambda slot: len(_at(slots, slot).pending)
        )
        for slot in order:
            entry = _at(slots, slot)
            taken = entry.pending[: BATCH - count]
            for token in taken:
                self.put(count, token, entry.read, slot)
                entry.read, count = entry.read + 1, count + 1
            if taken and entry.read >= len(entry.prompt):
                self.batch.logits[count - 1] = 1
                last[slot] = count - 1
        self.batch.n_tokens = count
        if self.binding.llama_decode(self.context, self.batch):
            raise ValueError("llama_decode failed")
        for slot, index in last.items():
            pointer = self.binding.llama_get_logits_ith(self.context, index)
            token, finite = best(np.ctypeslib.as_array(pointer, (self.vocab,)))
            if not finite:
                raise ValueError("logits that are not finite")
            _at(slots, slot).tokens.append(token)
        return list(last)

    def put(self, index: int, token: int, position: int, sequence: int) -> None:
        """One token of the batch."""
        batch = self.batch
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
        batch.seq_id[index][0], batch.logits[index] = sequence, 0


def _at(slots: list[_Sequence | None], slot: int) -> _Sequence:
    entry = slots[slot]
    assert entry is not None
    return entry


def opener() -> Open:
    """Import llama_cpp."""
    binding = import_binding()

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        system = binding.llama_print_system_info().decode()
        settings = {"build": system.strip(" |").replace(" | ", ", "), "cache": "f16"}
        engine: Any = Llama(binding, model, threads, length)
        return Opened(engine, ("llama-cpp-python",), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener, timed_batch)
