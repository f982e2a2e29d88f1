"""The quality of a package on a provider, without torch: its text is read once more, beside the stored figures.

The package holds the tokens of the text, and for each what the original model made of it: the loss, and the token that
it thinks most likely. So perplexity, its ratio and the agreement can be had anywhere; the divergence of whole
distributions needs the original, and is measured by an export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError
from partita.package import QUALITY, Manifest
from partita.providers.base import Provider
from partita.providers.resolve import Resolution
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.evaluation import Evaluation
from partita.runtime.pins import Pin
from partita.runtime.scoring import Logits, open_scorer


@dataclass(frozen=True, slots=True)
class OriginalFigures:
    """What the original model made of a text."""

    windows: npt.NDArray[np.int64]
    """[W, L] tokens; each window is read from the beginning."""
    losses: npt.NDArray[np.float32]
    """[W, L - 1] nats: of the token that follows each but the last one."""
    best: npt.NDArray[np.int64]
    """[W, L - 1]: the token that is most likely to follow."""


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
    original = _read_figures(folder)
    losses = np.full(original.losses.shape, np.nan)
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

            scorer.score(taken[:, :-1].tolist(), hear)
        provider = scorer.provider
    heard = ~np.isnan(losses) & ~np.isnan(original.losses)
    return Evaluation(
        provider=provider,
        tokens=int(heard.sum()),
        perplexity=math.exp(losses[heard].mean()),
        original_perplexity=math.exp(original.losses[heard].astype(np.float64).mean()),
        top1_agreement=float(agrees[heard].mean()),
    )


def loss(logits: Logits, token: int) -> float:
    """Nats that `token` costs after `logits` [vocab]."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    return float(highest + np.log(np.exp(wide - highest).sum()) - wide[token])


def _read_figures(folder: Path) -> OriginalFigures:
    """Read quality.safetensors. Raises PackageError when the package has none or it is damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / QUALITY
    if not path.is_file():
        raise PackageError(
            f"{folder}: the package has no {QUALITY}: only int8 and int4 packages have one, because only their weights "
            "are other than the original's; verify compares this one with its model"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            return OriginalFigures(
                file.get_tensor("windows").astype(np.int64),
                file.get_tensor("losses"),
                file.get_tensor("best").astype(np.int64),
            )
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=FROM_CHECKPOINT) from error
