"""The smoke run: a package is opened on a chain, reads a chunk of a prompt and one token, and gives finite logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from partita.errors import GenerationError, ProviderError
from partita.package import Manifest, SmokeRecord
from partita.providers.base import Provider
from partita.runtime.chain import idle_providers
from partita.runtime.feed import Feed
from partita.runtime.runner import Runner, load_runner

PROMPT_TOKENS = 5
"""Read in one step where a step may take several."""


def smoke(
    folder: Path,
    chain: Sequence[Provider],
    *,
    manifest: Manifest | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
) -> SmokeRecord:
    """Open the package in `folder` on `chain`, run a prefill step and a decode step, and look at the logits.

    The first provider of the chain has to take part. Raises PackageError, ProviderError, ResourceError, or
    GenerationError when a run fails or what comes out is not finite.
    """
    with load_runner(folder, tuple(chain), manifest=manifest, options=options) as runner:
        first = runner.resolutions[0]
        idle = [idle_providers(entry.session, entry.model) for entry in runner.graphs]
        if first.status != "active" or all(first.provider.name in names for names in idle):
            raise ProviderError(f"{folder}: {first.provider.name} takes no node of it")
        feed = prefill_feed(runner)
        run(runner, feed, 0)
        if feed.new_tokens < runner.max_length:
            run(runner, runner.decode_feed(), feed.new_tokens)
        names = ",".join(entry.provider.name for entry in runner.resolutions if entry.status == "active")
    detail = f"opened, read {feed.new_tokens} token{'s' if feed.new_tokens > 1 else ''} and one more; finite logits"
    return SmokeRecord(chain=names, status="ran", detail=detail)


def prefill_feed(runner: Runner) -> Feed:
    """A whole chunk of a static pair, else a few tokens, with the logits of the last one."""
    size = runner.chunk_fixed or max(1, min(PROMPT_TOKENS, runner.max_length - 1))
    return runner.prefill_feed(size, runner.prefill_rows or 1)


def run(runner: Runner, feed: Feed, start: int) -> None:
    """Feed tokens from all over the vocabulary at `start`, and look at the logits of the last one in each row."""
    count = runner.batch * feed.new_tokens
    feed.tokens[:] = np.linspace(0, runner.vocab_size - 1, count, dtype=np.int64).reshape(runner.batch, -1)
    last = feed.new_tokens - 1
    feed.choose((last,))
    feed.place(np.full(runner.batch, start, np.int64), start + feed.new_tokens)
    feed.run()
    for row in range(runner.batch):
        logits = feed.logits(row, last)
        if logits.shape != (runner.vocab_size,):
            raise GenerationError(
                f"{feed.file}: logits have the shape {list(logits.shape)}, [{runner.vocab_size}] is meant"
            )
        if not np.isfinite(logits.max()):  # -inf is how a model forbids a token
            raise GenerationError(
                f"{feed.file}: the logits of a {feed.phase} step are not finite; --precision bf16 or fp32 has a wider "
                "range than fp16, and the weights may hold NaN"
            )
