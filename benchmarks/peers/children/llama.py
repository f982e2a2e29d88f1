"""llama.cpp through llama-cpp-python's low-level functions, so that no Python of the binding is timed.

`python -m benchmarks.peers.children.llama MODEL WINDOWS OUT THREADS REFERENCE` reads a text. WINDOWS is an .npy of
[W, L] tokens; each window is read into an empty cache. Writes OUT, an .npz: `losses` [W, L - 1] in nats, `best`
[W, L - 1], the most likely token, and `divergence` [W, L - 1], the Kullback-Leibler divergence in nats from the
distributions in REFERENCE, an .npy that the first model writes where there is none.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.children.serving import Token, best

BATCH = 2048


class Llama:
    """A context over one GGUF file."""

    def __init__(self, binding: Any, file: Path, threads: int, length: int) -> None:
        self.binding = binding
        self.model = binding.llama_model_load_from_file(str(file).encode(), binding.llama_model_default_params())
        if not self.model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        context = binding.llama_context_default_params()
        context.n_ctx = max(length, 32)
        context.n_batch = min(context.n_ctx, BATCH)
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
        """Read tokens after those in the cache; logits of the last one, or of `every` one.

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

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """[vocab], of the token with this index in the last batch; a view that the next read overwrites."""
        pointer = self.binding.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(pointer, (self.vocab,))

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[Token]:
        """Read `prompt` from an empty cache, then yield greedy tokens."""
        self.clear()
        self.read(prompt)
        for number in range(new_tokens):
            token, finite = best(self.logits())
            yield token, finite
            if number < new_tokens - 1:
                self.read([token])

    def distributions(self, windows: Any) -> Any:
        """Log-probabilities [W, L - 1, vocab] of what follows each token of `windows` [W, L] but the last."""
        count, length = windows.shape
        found = np.zeros((count, length - 1, self.vocab), np.float32)
        for number, window in enumerate(windows):
            self.clear()
            self.read([int(token) for token in window[:-1]], every=True)
            logits = np.stack([self.logits(index) for index in range(length - 1)]).astype(np.float64)
            highest = logits.max(1, keepdims=True)
            found[number] = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
        return found


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


def main() -> None:
    """Read a text, and write what was found."""
    model, windows, out, threads, reference = sys.argv[1:]
    tokens = np.load(windows)
    found = Llama(import_binding(), Path(model), int(threads), tokens.shape[1]).distributions(tokens)
    if not Path(reference).is_file():
        np.save(reference, found)
    original = np.load(reference)
    losses = -np.take_along_axis(found, tokens[:, 1:, None], 2)[..., 0]
    divergence = (np.exp(original) * (original - found)).sum(2)
    np.savez(out, losses=losses, best=found.argmax(2), divergence=divergence)


if __name__ == "__main__":
    main()
