"""Logits of a text: windows of tokens are read into an empty cache, and whoever asks hears what follows each token.

Knows tokens and logits only: what a figure of quality is made of is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.package import Manifest
from partita.providers.base import Provider
from partita.providers.resolve import Resolution
from partita.runtime.chain import idle_providers
from partita.runtime.engine.request import Listener, Request
from partita.runtime.engine.running import serve
from partita.runtime.pins import Pin
from partita.runtime.runner import Runner, load_runner

SCORE_CHUNK_TOKENS = 128
"""Read at a time: the logits of a chunk are in memory, vocabulary by vocabulary."""

Logits = npt.NDArray[np.float32]
Hear = Callable[[int, int, Logits], object]
"""Hears the number of a window, a 0-based position in it, and the logits [vocab] of what follows."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """An open package that reads windows of tokens."""

    runner: Runner

    @property
    def rows(self) -> int:
        """Windows that are read side by side."""
        return self.runner.executor.rows

    @property
    def provider(self) -> str:
        """The providers that take part."""
        idle = {name for entry in self.runner.graphs for name in idle_providers(entry.session, entry.model)}
        active = [
            r.provider.ort_name for r in self.runner.resolutions if r.status == "active" and r.provider.name not in idle
        ]
        return ", ".join(active)

    def continues_at(self, length: int) -> int | None:
        """Tokens of a window of `length` that are read as a prompt, where what follows one has a graph of its own that
        computes otherwise, or gives more logits; None where all are read alike.
        """
        apart = self.runner.executor.graphs.decode_takes_several or self._tells_one
        return max(1, length // 2) if apart else None

    @property
    def _tells_one(self) -> bool:
        """Whether the graph for prompts gives the logits of one token of a chunk: the rest is read token by token."""
        graphs = self.runner.executor.graphs
        return graphs.chunk is not None and graphs.logits_rows == 1

    def score(self, windows: Sequence[Sequence[int]], hear: Hear) -> None:
        """Read windows [up to `rows`][L], all of one length, and tell the logits after each token.

        Of a package with a graph for prompts of its own each half of a window is read by one, as in a generation. A
        static graph that gives the logits of one token of a chunk tells no others; the other half is read token by
        token. Raises GenerationError, ProviderError or ResourceError when a run fails, or a logit is no number.
        """
        runner = self.runner
        runner.cache.clear()
        goes_on = self.continues_at(len(windows[0]))
        requests = [
            Request(
                list(windows[row]),
                listener=_listener(row, hear),
                any_logits=True,
                rope_length=len(windows[row]),
                continues_at=goes_on,
                singly=self._tells_one,
            )
            if row < len(windows)
            else Request(list(windows[0]), continues_at=goes_on, singly=self._tells_one)
            for row in range(self.rows)
        ]
        for _ in serve(runner.executor, requests, prefill_chunk=SCORE_CHUNK_TOKENS):
            pass

    def cached(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Keys and values of what was read last: past input and [B, KV heads, tokens, head size]; on the host."""
        cache = self.runner.cache
        filled = max(cache.filled)
        for state, buffer in zip(cache.states, cache.buffers, strict=True):
            if state.kind in ("key", "value"):
                yield state.past, buffer.host[:, :, :filled]


def _listener(row: int, hear: Hear) -> Listener:
    """A listener of one row."""

    def listen(position: int, logits: Logits) -> None:
        if not np.isfinite(logits.max()):
            raise GenerationError(f"the logits after token {position} of a window are not finite")
        hear(row, position, logits)

    return listen


@contextmanager
def open_scorer(
    folder: Path,
    chain: Sequence[Provider],
    *,
    threads: int | None = None,
    manifest: Manifest | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
    pins: Sequence[Pin] = (),
    told: Callable[[Sequence[Resolution]], object] = len,
) -> Iterator[Scorer]:
    """A package opened on the providers of `chain`. `told` hears what became of them.

    Raises PackageError, ProviderError, ResourceError; UsageError when no node fits a pin.
    """
    with load_runner(folder, tuple(chain), threads=threads, manifest=manifest, options=options, pins=pins) as runner:
        told(runner.resolutions)
        yield Scorer(runner)
