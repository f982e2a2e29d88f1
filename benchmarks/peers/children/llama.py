"""llama.cpp through llama-cpp-python's low-level functions, so that no Python of the binding is timed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.serving import Logits, Open, Opened, best, serve

EXTRA_BUFFERS = "PARTITA_BENCH_LLAMA_EXTRA_BUFFERS"
"""0: weights stay as they are in the file, without repacking."""
BATCH = 2048


class Llama:
    """A context over one GGUF file."""

    def __init__(self, binding: Any, file: Path, threads: int, length: int) -> None:
        self.binding = binding
        model = binding.llama_model_default_params()
        model.use_extra_bufts = os.environ.get(EXTRA_BUFFERS, "1") != "0"
        self.model = binding.llama_model_load_from_file(str(file).encode(), model)
        if not self.model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        context = binding.llama_context_default_params()
        context.n_ctx = context.n_batch = max(length, 32)
        context.n_batch = min(context.n_batch, BATCH)
        context.n_threads = context.n_threads_batch = threads
        context.no_perf = True
        self.context = binding.llama_init_from_model(self.model, context)
        if not self.context:
            raise ValueError(f"{file}: llama.cpp cannot make a context for it")
        self.vocab = int(binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(self.model)))

    def clear(self) -> None:
        """Empty the cache."""
        self.binding.llama_memory_clear(self.binding.llama_get_memory(self.context), False)

    def read(self, tokens: list[int], *, every: bool = False) -> None:
        """Read tokens behind those that were read before; logits of the last one, or of `every` one.

        For `every` one, all tokens have to fit one batch.
        """
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            array = (ctypes.c_int32 * len(part))(*part)
            batch = self.binding.llama_batch_get_one(array, len(part))
            marks = (ctypes.c_int8 * len(part))(*[1] * len(part))
            if every:
                batch.logits = ctypes.cast(marks, ctypes.POINTER(ctypes.c_int8))
            if self.binding.llama_decode(self.context, batch):
                raise ValueError("llama_decode failed")

    def logits(self, index: int = -1) -> Logits:
        """[vocab], of the token with this index in the last batch; a view that the next read overwrites."""
        pointer = self.binding.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(pointer, (self.vocab,))

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[tuple[int, bool]]:
        """See Engine."""
        self.clear()
        self.read(prompt)
        for number in range(new_tokens):
            token, finite = best(self.logits())
            yield token, finite
            if number < new_tokens - 1:
                self.read([token])


def import_binding() -> Any:
    """Import llama_cpp, silently."""
    global _LOG
    import llama_cpp  # type: ignore[import-not-found]

    _LOG = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(_LOG, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


_LOG: Any = None
"""The callback that says nothing; llama.cpp keeps its address alone."""


def opener() -> Open:
    """Import llama_cpp."""
    binding = import_binding()

    def open_engine(model: Path, threads: int, length: int) -> Opened:
        system = binding.llama_print_system_info().decode()
        extra = "no" if os.environ.get(EXTRA_BUFFERS, "1") == "0" else "yes"
        settings = {"build": system.strip(" |").replace(" | ", ", "), "repacked weights": extra, "cache": "f16"}
        return Opened(Llama(binding, model, threads, length), ("llama-cpp-python",), settings)

    return open_engine


if __name__ == "__main__":
    serve(opener)
