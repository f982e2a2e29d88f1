"""`python -m benchmarks.peers.children.llama_quality MODEL WINDOWS OUT THREADS`: the losses of a text with llama.cpp.

WINDOWS is an .npy of [W, L] tokens; each window is read into an empty cache. Writes OUT, an .npz: `losses`
[W, L - 1] in nats, and `best` [W, L - 1], the token that is thought most likely.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.llama import Llama, import_binding


def read_text(llama: Llama, windows: Any) -> tuple[Any, Any]:
    """Losses and most likely tokens of `windows` [W, L]."""
    count, length = windows.shape
    losses, best = np.zeros((count, length - 1)), np.zeros((count, length - 1), np.int64)
    for number, window in enumerate(windows):
        llama.clear()
        llama.read([int(token) for token in window[:-1]], every=True)
        logits = np.stack([llama.logits(index) for index in range(length - 1)]).astype(np.float64)
        highest = logits.max(1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
        losses[number] = total - logits[np.arange(length - 1), window[1:]]
        best[number] = logits.argmax(1)
    return losses, best


def main() -> None:
    """Read, and write what was found."""
    model, windows, out, threads = Path(sys.argv[1]), np.load(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    llama = Llama(import_binding(), model, threads, windows.shape[1])
    losses, best = read_text(llama, windows)
    np.savez(out, losses=losses, best=best)


if __name__ == "__main__":
    main()
