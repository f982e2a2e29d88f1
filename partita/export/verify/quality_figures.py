"""Quality figures of a package: losses and divergence per token, and their summary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from partita.export.verify.texts import Text
from partita.package.records import LikelyDivergence, PhaseQuality, Quality

MOST_LIKELY, LIKELY_BYTES = 64, 2 << 20
"""Maximum number of likeliest tokens stored per position, and size in bytes of all of them."""
LARGEST_LOSS = 709.0
"""In nats: exp of a larger number overflows."""
LEAST_REST = 1e-12
"""Smaller probabilities of the other tokens, computed as one minus a sum, count as 0."""


@dataclass(slots=True)
class Measured:
    """Losses and divergence per position; NaN for positions not measured."""

    tokens: npt.NDArray[np.int64]
    """[W, L]."""
    losses: npt.NDArray[np.float64]
    """[W, L - 1] nats."""
    original: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]
    divergence: npt.NDArray[np.float64]
    agrees: npt.NDArray[np.bool_]
    likely: npt.NDArray[np.int32]
    """[W, L - 1, K]: the source model's likeliest tokens."""
    likely_logprobs: npt.NDArray[np.float32]
    """[W, L - 1, K]: the source model's log-probabilities of them."""
    rest_logprobs: npt.NDArray[np.float32]
    """[W, L - 1]: its log-probability of all others; minus infinity for none."""
    likely_divergence: npt.NDArray[np.float64]
    """The divergence over the likeliest tokens and the rest."""

    @classmethod
    def of(cls, windows: npt.NDArray[np.int64], vocab_size: int) -> Measured:
        """An empty record for `windows` [W, L]."""
        shape = len(windows), windows.shape[1] - 1
        kept = (*shape, kept_tokens(len(windows) * (windows.shape[1] - 1), vocab_size))
        return cls(
            windows,
            np.full(shape, np.nan),
            np.full(shape, np.nan),
            np.zeros(shape, np.int64),
            np.full(shape, np.nan),
            np.zeros(shape, np.bool_),
            np.zeros(kept, np.int32),
            np.full(kept, np.nan, np.float32),
            np.full(shape, np.nan, np.float32),
            np.full(shape, np.nan),
        )

    def note(
        self, at: tuple[list[int], list[int]], ours: torch.Tensor, theirs: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Record logits `ours` and `theirs` [R, vocab] for the tokens after R positions, `at` windows and places.

        Both are overwritten, as is `scratch` [R, vocab].
        """
        windows, places = np.array(at[0]), np.array(at[1])
        token = torch.from_numpy(self.tokens[windows, places + 1]).unsqueeze(-1)
        torch.log_softmax(ours, -1, out=scratch)
        mine, other = scratch, torch.log_softmax(theirs, -1, out=ours)
        self.losses[windows, places] = -mine.gather(-1, token)[:, 0].numpy()
        self.original[windows, places] = -other.gather(-1, token)[:, 0].numpy()
        best = other.argmax(-1)
        self.best[windows, places] = best.numpy()
        self.agrees[windows, places] = (mine.argmax(-1) == best).numpy()
        self._note_likely(windows, places, mine, other)
        shares = torch.exp(other, out=theirs)
        further = other.sub_(mine).mul_(shares).masked_fill_(shares == 0, 0.0)
        self.divergence[windows, places] = further.sum(-1).clamp_(min=0.0).numpy()

    def _note_likely(
        self, windows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], mine: torch.Tensor, other: torch.Tensor
    ) -> None:
        """Record the source model's likeliest tokens.

        From log-probabilities [R, vocab] of the package and of itself.
        """
        known, tokens = other.topk(self.likely.shape[-1], dim=-1, sorted=False)
        whole = tokens.shape[-1] == other.shape[-1]
        shares, ours = torch.exp(known), mine.gather(-1, tokens)
        rest = torch.zeros(len(shares), dtype=shares.dtype) if whole else 1.0 - shares.sum(-1)
        rest = torch.where(rest < LEAST_REST, torch.zeros_like(rest), rest)
        our_rest = (1.0 - torch.exp(ours).sum(-1)).clamp_(min=LEAST_REST)
        further = ((known - ours) * shares).masked_fill_(shares == 0, 0.0).sum(-1)
        further += ((rest.log() - our_rest.log()) * rest).masked_fill_(rest == 0, 0.0)
        self.likely[windows, places] = tokens.numpy()
        self.likely_logprobs[windows, places] = known.numpy()
        self.rest_logprobs[windows, places] = rest.log().numpy()
        self.likely_divergence[windows, places] = further.clamp_(min=0.0).numpy()


def kept_tokens(positions: int, vocab_size: int) -> int:
    """The number of likeliest tokens stored per position."""
    size = np.dtype(id_type(vocab_size)).itemsize + np.dtype(np.float32).itemsize
    return max(1, min(MOST_LIKELY, vocab_size, LIKELY_BYTES // (max(1, positions) * size)))


def id_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest integer type for token ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def perplexity(loss: float) -> float:
    """exp of a loss or of a difference of losses; the largest float where that overflows."""
    return math.exp(min(loss, LARGEST_LOSS))


def quality_of(text: Text, found: Measured, provider: str) -> Quality:
    """The quality record."""
    heard = ~np.isnan(found.losses)
    ours, theirs = (float(losses[heard].mean()) for losses in (found.losses, found.original))
    return Quality(
        text=text.name,
        text_sha256=text.sha256,
        tokens=int(heard.sum()),
        window_tokens=text.windows.shape[1],
        provider=provider,
        original_perplexity=perplexity(theirs),
        perplexity=perplexity(ours),
        perplexity_ratio=perplexity(ours - theirs),
        top1_agreement=float(found.agrees[heard].mean()),
        kl_mean=float(found.divergence[heard].mean()),
        kl_p99=float(np.quantile(found.divergence[heard], 0.99)),
        likely=LikelyDivergence(
            tokens=found.likely.shape[-1],
            share=float(1.0 - np.exp(found.rest_logprobs[heard].astype(np.float64)).mean()),
            kl_mean=float(found.likely_divergence[heard].mean()),
            kl_p99=float(np.quantile(found.likely_divergence[heard], 0.99)),
        ),
    )


def phases_of(found: Measured, goes_on: int | None) -> tuple[PhaseQuality, ...]:
    """The figures of the two halves of the windows, where they are run by different graphs."""
    if goes_on is None:
        return ()
    phases = []
    for phase, part in (("prefill", slice(None, goes_on)), ("decode", slice(goes_on, None))):
        heard = ~np.isnan(found.losses[:, part])
        if heard.any():
            ours, theirs = (losses[:, part][heard].mean() for losses in (found.losses, found.original))
            phases.append(
                PhaseQuality(
                    phase=phase,
                    tokens=int(heard.sum()),
                    perplexity_ratio=perplexity(ours - theirs),
                    top1_agreement=float(found.agrees[:, part][heard].mean()),
                    kl_mean=float(found.divergence[:, part][heard].mean()),
                )
            )
    return tuple(phases)
