"""The child's end: a question per line of stdin, an answer per line of stdout, both JSON.

Runs in the environment of any peer, so it needs the standard library and numpy only. Times are of a monotonic clock, in
seconds; what a peer's library takes to be imported is told apart from what it takes to open a model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PROVIDER, CAPTURE = "PARTITA_BENCH_PROVIDER", "PARTITA_BENCH_CAPTURE"
"""Variables of a child: the execution provider, and whether decode steps are recorded and replayed."""
Token = tuple[int, bool]
"""A greedy token, and whether all logits that it was chosen from were finite."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open model, and what there is to report about it."""

    generate: Callable[[list[int], int], Iterator[Token]]
    """Reads a prompt from an empty cache, then yields so many greedy tokens, each as soon as it is known."""
    versions: tuple[str, ...]
    """Distributions whose versions belong to the figures."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings and build flags that a reader has to know."""


Open = Callable[[Path, int, int], Opened]
"""Opens a model: its path, threads, and the most tokens that a prompt and its answer have together."""


def provider() -> str:
    """Where this child's model runs."""
    return os.environ.get(PROVIDER, "cpu")


def captures() -> bool:
    """Whether its decode steps are recorded and replayed."""
    return bool(os.environ.get(CAPTURE))


def best(logits: Any) -> tuple[int, bool]:
    """Index of the largest of `logits` [vocab], and whether all are finite."""
    return int(logits.argmax()), bool(np.isfinite(logits.min()) and np.isfinite(logits.max()))


def timed(opened: Opened, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """One turn: seconds to the first token, seconds of all that follow, and the tokens."""
    began = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    finite = True
    for token, sound in opened.generate(prompt, new_tokens):
        if not tokens:
            first = time.perf_counter() - began
        tokens.append(token)
        finite &= sound
    return {
        "prefill_seconds": first,
        "decode_seconds": time.perf_counter() - began - first,
        "tokens": tokens,
        "finite": finite,
        "peak_rss_bytes": peak_rss_bytes(),
        "cpu_seconds": time.process_time(),
    }


def peak_rss_bytes() -> int:
    """Largest resident memory of this process; of Linux's VmHWM, because ru_maxrss begins with the parent's."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def serve(peer: Callable[[], Open]) -> None:
    """Answer until stdin ends. `peer` imports the peer's library and returns what opens a model."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the peers print to stdout
    opened: Opened | None = None
    for line in sys.stdin:
        try:
            if opened is None:
                opened, answer = open_model(peer, **json.loads(line))
            else:
                answer = timed(opened, **json.loads(line))
        except Exception as error:  # noqa: BLE001 - the parent has to hear of it, whatever a peer raises
            answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)  # some native libraries do not survive being unloaded


def open_model(peer: Callable[[], Open], model: str, threads: int, length: int) -> tuple[Opened, dict[str, Any]]:
    """Open a model; it, and what that took."""
    began = time.perf_counter()
    opener = peer()
    imported = time.perf_counter()
    opened = opener(Path(model), threads, length)
    return opened, {
        "import_seconds": imported - began,
        "load_seconds": time.perf_counter() - imported,
        "versions": {name: found for name in opened.versions if (found := _version(name))},
        "settings": opened.settings,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
