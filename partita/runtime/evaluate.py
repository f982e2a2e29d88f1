"""The quality of a package on a provider, without torch: its text is read once more, beside the stored figures.

The package holds the tokens of the text, and for each what the original model made of it: the loss, the token that it
thinks most likely, and the log-probabilities of the likeliest tokens with what all others have together. So perplexity,
its ratio and the agreement can be had anywhere, and the divergence with the others taken as one token: that is a lower
bound of the divergence over the whole vocabulary (the log sum inequality), which an export alone measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.dtypes import EXACT, PRECISIONS
from partita.errors import PackageError
from partita.package import QUALITY, Manifest, read_manifest
from partita.providers.base import Provider
from partita.providers.resolve import Resolution
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.evaluation import Evaluation
from partita.runtime.pins import Pin
from partita.runtime.scoring import Logits, open_scorer

LARGEST_LOSS = 709.0
"""In nats: e to the power of more is no float."""


@dataclass(frozen=True, slots=True)
class OriginalFigures:
    """What the original model made of a text."""

    windows: npt.NDArray[np.int64]
    """[W, L] tokens; each window is read from the beginning."""
    losses: npt.NDArray[np.float32]
    """[W, L - 1] nats: of the token that follows each but the last one."""
    best: npt.NDArray[np.int64]
    """[W, L - 1]: the token that is most likely to follow."""
    likely: Likely | None
    """None in a package that was written without."""


@dataclass(frozen=True, slots=True)
class Likely:
    """The tokens that the original thinks most likely to follow, all others taken as one."""

    tokens: npt.NDArray[np.int64]
    """[W, L - 1, K]."""
    shares: npt.NDArray[np.float64]
    """[W, L - 1, K + 1]: their probabilities and, last, that of all others; they add up to 1."""


def _perplexity(nats: float) -> float:
    """Of a mean loss. One that is beyond a float, as of a provider that computes something else, is the largest."""
    return math.exp(min(nats, LARGEST_LOSS))


def evaluate(
    folder: Path,
    chain: Sequence[Provider],
    *,
    threads: int | None = None,
    manifest: Manifest | None = None,
    options: Mapping[str, Mapping[str, str]] | None = None,
    pins: Sequence[Pin] = (),
    told: Callable[[Sequence[Resolution]], object] = len,
) -> Evaluation:
    """Read the package's text on the providers of `chain`, and compare with what the original made of it.

    `told` hears what became of the chain. Raises PackageError when the package has no such
    figures, ProviderError, ResourceError, or GenerationError when a run fails.
    """
    original = _read_figures(folder, manifest)
    likely = original.likely
    losses = np.full(original.losses.shape, np.nan)
    divergence = np.full(original.losses.shape, np.nan)
    agrees = np.zeros(original.losses.shape, np.bool_)
    count = len(original.windows)
    with open_scorer(
        folder, chain, threads=threads, manifest=manifest, options=options, pins=pins, told=told
    ) as scorer:
        for first in range(0, count, scorer.rows):
            taken = original.windows[first : first + scorer.rows]

            def hear(row: int, position: int, logits: Logits, first: int = first) -> None:
                window = first + row
                losses[window, position] = loss(logits, int(original.windows[window, position + 1]))
                agrees[window, position] = int(logits.argmax()) == int(original.best[window, position])
                if likely is not None:
                    kept = likely.tokens[window, position], likely.shares[window, position]
                    divergence[window, position] = divergence_at_least(logits, *kept)

            scorer.score(taken[:, :-1].tolist(), hear)
        provider = scorer.provider
    heard = ~np.isnan(losses) & ~np.isnan(original.losses)
    return Evaluation(
        provider=provider,
        tokens=int(heard.sum()),
        perplexity=_perplexity(float(losses[heard].mean())),
        original_perplexity=_perplexity(float(original.losses[heard].astype(np.float64).mean())),
        top1_agreement=float(agrees[heard].mean()),
        kl_mean_at_least=None if likely is None else float(divergence[heard].mean()),
        kl_p99_at_least=None if likely is None else float(np.quantile(divergence[heard], 0.99)),
        kl_tokens=None if likely is None else likely.tokens.shape[-1],
        kl_share=None if likely is None else float(1.0 - likely.shares[heard][:, -1].mean()),
    )


def loss(logits: Logits, token: int) -> float:
    """Nats that `token` costs after `logits` [vocab]."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    return float(highest + np.log(np.exp(wide - highest).sum()) - wide[token])


def divergence_at_least(logits: Logits, tokens: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> float:
    """Nats by which the distribution of `logits` [vocab] diverges from one that gives `tokens` [K] the probabilities
    `shares` [K + 1], the last of which is that of all others. At most the divergence over the whole vocabulary.
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


def _read_figures(folder: Path, manifest: Manifest | None) -> OriginalFigures:
    """Read quality.safetensors. Raises PackageError when the package has none or it is damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / QUALITY
    if not path.is_file():
        raise _no_figures(folder, manifest or read_manifest(folder))
    try:
        with safe_open(path, framework="numpy") as file:
            return OriginalFigures(
                file.get_tensor("windows").astype(np.int64),
                file.get_tensor("losses"),
                file.get_tensor("best").astype(np.int64),
                _read_likely(file) if "likely" in file.keys() else None,  # noqa: SIM118 - it is no mapping
            )
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=FROM_CHECKPOINT) from error


def _read_likely(file: Any) -> Likely:
    """The likeliest tokens from an open quality.safetensors."""
    logprobs = file.get_tensor("likely_logprobs"), file.get_tensor("rest_logprobs")[..., None]
    shares = np.exp(np.concatenate(logprobs, axis=-1, dtype=np.float64))
    return Likely(file.get_tensor("likely").astype(np.int64), shares / shares.sum(-1, keepdims=True))


def _no_figures(folder: Path, manifest: Manifest) -> PackageError:
    """The error for a package that has no text to read."""
    if manifest.foreign is not None:
        return PackageError(f"{folder}: it has no {QUALITY}: Partita did not write it, and measured nothing of it")
    if PRECISIONS[manifest.graph.precision] is not EXACT:
        return PackageError(
            f"{folder}: the package has no {QUALITY}: it was exported without its original, or by an older Partita",
            remedy=FROM_CHECKPOINT,
        )
    return PackageError(
        f"{folder}: the package has no {QUALITY}: nothing is rounded in fp32, so nothing was measured; verify compares "
        "this one with its model"
    )
