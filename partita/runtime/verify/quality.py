"""Measures a package's quality on a provider, without torch: its text is run again and compared with stored figures.

The package contains the tokens of the text and, for each, the source model's loss, greedy next token, and
log-probabilities of its most likely tokens. Perplexity, ratio and greedy match are exact. The KL divergence treats all
other tokens as one, so it is a lower bound (log sum inequality).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import GenerationError, PackageError
from partita.package.folder import QUALITY, Manifest
from partita.package.known_answer import read_known_answer
from partita.package.records import Evaluation, Verification
from partita.providers.base import Provider
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.generate.loop import serve
from partita.runtime.generate.request import Request
from partita.runtime.generate.runner import Runner
from partita.runtime.verify.comparison import Logits
from partita.runtime.verify.replay import open_briefly, replay_opened, used_providers

LARGEST_LOSS = 709.0
"""Maximum mean loss in nats; above, its exponential overflows."""
SCORE_CHUNK_TOKENS = 128
"""Prefill chunk in tokens; the logits of a chunk are in memory at once."""

OnLogits = Callable[[int, int, Logits], object]
"""Called with the number of a window, a 0-based position in it, and the logits [vocab] after it."""


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """The source model's figures of a text."""

    windows: npt.NDArray[np.int64]
    """[W, L] tokens; each window starts with an empty cache."""
    losses: npt.NDArray[np.float32]
    """[W, L - 1]: loss of the next token in nats."""
    top_tokens: npt.NDArray[np.int64]
    """[W, L - 1]: the most likely next token."""
    likely: npt.NDArray[np.int64] | None
    """[W, L - 1, K]: the most likely next tokens; None in a package without these."""
    shares: npt.NDArray[np.float64] | None
    """[W, L - 1, K + 1]: probabilities of the likely tokens and, last, of all others; the sum is 1."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """An open package that scores windows of tokens."""

    runner: Runner

    @property
    def rows(self) -> int:
        """Windows per batch."""
        return self.runner.rows

    @property
    def provider(self) -> str:
        """The providers that have nodes."""
        return used_providers(self.runner)

    def continues_at(self, length: int) -> int | None:
        """Number of window tokens to prefill if the decode graph has other weights or more logits; None: all."""
        capacity = self.runner.capacity
        apart = capacity.decode_any_length or (capacity.chunk is not None and capacity.logits_rows == 1)
        return max(1, length // 2) if apart else None

    def replay(self, manifest: Manifest) -> Verification:
        """Replay the known answer of the package; see `replay`."""
        self.runner.cache.clear()
        return replay_opened(manifest, self.runner, read_known_answer(self.runner.folder))

    def score(self, windows: Sequence[Sequence[int]], on_logits: OnLogits) -> None:
        """Run windows [up to `rows`][L] of one length and call the listener with the logits after each token.

        A package with a separate prefill graph runs the first half of each window with it, and if that graph has logits
        of one token per chunk, the second half token by token. Raises GenerationError, ProviderError or ResourceError
        when a run fails or a logit is not finite.
        """
        self.runner.cache.clear()
        continues_at, capacity = self.continues_at(len(windows[0])), self.runner.capacity
        requests = [
            Request(
                list(windows[min(row, len(windows) - 1)]),
                listener=_checked(row, on_logits) if row < len(windows) else None,
                any_logits=row < len(windows),
                rope_length=len(windows[0]) if row < len(windows) else 0,
                continues_at=continues_at,
                one_by_one=capacity.chunk is not None and capacity.logits_rows == 1,
            )
            for row in range(self.rows)
        ]
        for _ in serve(self.runner, requests, prefill_chunk=SCORE_CHUNK_TOKENS):
            pass

    def cached(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Keys and values of the last windows, on the host: input name and [B, KV heads, tokens, head size]."""
        cache = self.runner.cache
        filled = max(cache.lengths)
        for state, buffer in zip(cache.states, cache.buffers, strict=True):
            if state.kind in ("key", "value"):
                yield state.past, buffer.host[:, :, :filled]


def _checked(row: int, on_logits: OnLogits) -> Callable[[int, Logits], object]:
    """A listener of one row that raises GenerationError for logits that are not finite."""

    def listen(position: int, logits: Logits) -> None:
        if not np.isfinite(logits.max()):
            raise GenerationError(f"the logits after token {position} of a window are not finite")
        on_logits(row, position, logits)

    return listen


@contextmanager
def open_scorer(folder: Path, chain: Sequence[Provider], **opening: Any) -> Iterator[Scorer]:
    """Open a package on `chain`; see `load_runner`. Raises PackageError, ProviderError, ResourceError."""
    with open_briefly(folder, chain, **opening) as runner:
        yield Scorer(runner)


def evaluate(runner: Runner, original: SourceFigures) -> Evaluation:
    """Run the package's text and compare it with the source model's figures.

    Raises ProviderError, ResourceError, or GenerationError when a run fails.
    """
    scorer, likely, shares = Scorer(runner), original.likely, original.shares
    losses, divergence = (np.full(original.losses.shape, np.nan) for _ in range(2))
    agrees = np.zeros(original.losses.shape, np.bool_)
    for first in range(0, len(original.windows), scorer.rows):

        def measure(row: int, position: int, logits: Logits, first: int = first) -> None:
            window = first + row
            losses[window, position] = loss(logits, int(original.windows[window, position + 1]))
            agrees[window, position] = int(logits.argmax()) == int(original.top_tokens[window, position])
            if likely is not None and shares is not None:
                known = likely[window, position], shares[window, position]
                divergence[window, position] = divergence_at_least(logits, *known)

        scorer.score(original.windows[first : first + scorer.rows, :-1].tolist(), measure)
    measured = ~np.isnan(losses) & ~np.isnan(original.losses)
    perplexity = _perplexity(float(losses[measured].mean()))
    original_perplexity = _perplexity(float(original.losses[measured].astype(np.float64).mean()))
    return Evaluation(
        provider=scorer.provider,
        tokens=int(measured.sum()),
        perplexity=perplexity,
        original_perplexity=original_perplexity,
        perplexity_ratio=perplexity / original_perplexity,
        top1_agreement=float(agrees[measured].mean()),
        kl_mean_at_least=None if likely is None else float(divergence[measured].mean()),
        kl_p99_at_least=None if likely is None else float(np.quantile(divergence[measured], 0.99)),
        kl_tokens=None if likely is None else likely.shape[-1],
        kl_share=None if shares is None else float(1.0 - shares[measured][:, -1].mean()),
    )


def _perplexity(nats: float) -> float:
    """Perplexity of a mean loss, at most the largest float."""
    return math.exp(min(nats, LARGEST_LOSS))


def loss(logits: Logits, token: int) -> float:
    """Negative log-likelihood of `token` in nats, from `logits` [vocab]."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    return float(highest + np.log(np.exp(wide - highest).sum()) - wide[token])


def divergence_at_least(logits: Logits, tokens: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> float:
    """Lower bound in nats of the KL divergence of `logits` [vocab] from the reference.

    `tokens` [K]: the reference's most likely tokens. `shares` [K + 1]: their probabilities and, last, that of all
    others.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    weights = np.exp(wide)
    total = np.log(weights.sum())
    weights[tokens] = 0.0
    with np.errstate(divide="ignore"):
        ours = np.append(wide[tokens], np.log(weights.sum())) - total
    there = shares > 0
    return float((shares[there] * (np.log(shares[there]) - ours[there])).sum())


def read_figures(folder: Path, manifest: Manifest) -> SourceFigures:
    """Read quality.safetensors. Raises PackageError when it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / QUALITY
    if not path.is_file():
        if manifest.foreign is not None:
            raise PackageError(f"{folder}: it has no {QUALITY}, because Partita did not export it")
        if PRECISIONS[manifest.graph.precision] is not EXACT:
            reason = "it was exported without its source model, or by an older version of Partita"
            raise PackageError(f"{folder}: the package has no {QUALITY}: {reason}", remedy=FROM_CHECKPOINT)
        reason = "quality is not measured for fp32 packages; use `partita verify` to compare it with its source model"
        raise PackageError(f"{folder}: the package has no {QUALITY}: {reason}")
    try:
        with safe_open(path, framework="numpy") as file:
            likely = shares = None
            if "likely" in file.keys():  # noqa: SIM118 - it is no mapping
                likely = file.get_tensor("likely").astype(np.int64)
                logprobs = file.get_tensor("likely_logprobs"), file.get_tensor("rest_logprobs")[..., None]
                shares = np.exp(np.concatenate(logprobs, axis=-1, dtype=np.float64))
                shares /= shares.sum(-1, keepdims=True)
            windows, top_tokens = (file.get_tensor(name).astype(np.int64) for name in ("windows", "best"))
            return SourceFigures(windows, file.get_tensor("losses"), top_tokens, likely, shares)
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=FROM_CHECKPOINT) from error
