"""`python -m benchmarks.peers.children.llama_quality MODEL WINDOWS OUT THREADS REFERENCE`: a text read with llama.cpp.

WINDOWS is an .npy of [W, L] tokens; each window is read into an empty cache. Writes OUT, an .npz: `losses` [W, L - 1]
in nats, `best` [W, L - 1], the token that is thought most likely, and `divergence` [W, L - 1], the Kullback-Leibler
divergence in nats from the distributions in REFERENCE, an .npy that the first model writes where there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.llama import Llama, import_binding


def read_text(llama: Llama, windows: Any) -> Any:
    """Log-probabilities [W, L - 1, vocab] of what follows each token of `windows` [W, L] but the last."""
    count, length = windows.shape
    found = np.zeros((count, length - 1, llama.vocab), np.float32)
    for number, window in enumerate(windows):
        llama.clear()
        llama.read([int(token) for token in window[:-1]], every=True)
        logits = np.stack([llama.logits(index) for index in range(length - 1)]).astype(np.float64)
        highest = logits.max(1, keepdims=True)
        found[number] = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
    return found


def main() -> None:
    """Read, and write what was found."""
    model, windows, out, threads, reference = sys.argv[1:]
    tokens = np.load(windows)
    llama = Llama(import_binding(), Path(model), int(threads), tokens.shape[1])
    found = read_text(llama, tokens)
    if not Path(reference).is_file():
        np.save(reference, found)
    original = np.load(reference)
    losses = -np.take_along_axis(found, tokens[:, 1:, None], 2)[..., 0]
    divergence = (np.exp(original) * (original - found)).sum(2)
    np.savez(out, losses=losses, best=found.argmax(2), divergence=divergence)


if __name__ == "__main__":
    main()
