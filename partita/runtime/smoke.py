"""The smoke run: a package is opened on a chain, reads a chunk of a prompt and one token, and gives finite logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, ProviderError
from partita.observations.text_format import plural
from partita.package import Manifest
from partita.package_records import SmokeRecord
from partita.providers.base import Provider
from partita.runtime.chain import idle_providers
from partita.runtime.engine.request import Request
from partita.runtime.engine.running import serve
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
            raise ProviderError(f"{folder}: {first.provider.name} takes none of its nodes")
        size = _prompt_tokens(runner)
        for _ in serve(runner.executor, [_request(runner, row, size) for row in range(runner.executor.rows)]):
            pass
        if runner.executor.graphs.takes_fewer_rows:
            for _ in serve(runner.executor, [_request(runner, 0, size)]):
                pass
        names = ",".join(entry.provider.name for entry in runner.resolutions if entry.status == "active")
    detail = f"opened, read {plural(size, 'token')} and one more; its logits are finite"
    return SmokeRecord(chain=names, status="ran", detail=detail)


def _prompt_tokens(runner: Runner) -> int:
    """A whole chunk of a static pair, else a few tokens."""
    return runner.executor.graphs.chunk or max(1, min(PROMPT_TOKENS, runner.contract.max_length - 1))


def _request(runner: Runner, row: int, size: int) -> Request:
    """A prompt of tokens from all over the vocabulary, and two more: one from the prompt, one from a decode step."""
    vocab_size, batch = runner.contract.vocab_size, runner.executor.rows
    spread = np.linspace(0, vocab_size - 1, batch * size, dtype=np.int64).reshape(batch, size)

    def pick(logits: npt.NDArray[np.float32], history: npt.NDArray[np.int64]) -> int:
        if logits.shape != (vocab_size,):
            raise GenerationError(f"logits have the shape {list(logits.shape)}, expected [{vocab_size}]")
        return int(logits.argmax())

    return Request(spread[row].tolist(), pick, max_new_tokens=2)
