"""The figures of a quality: what a package and its original say of the tokens of a text, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from partita.export.verify.texts import Text
from partita.package.records import LikelyDivergence, PhaseQuality, Quality

MOST_LIKELY, LIKELY_BYTES = 64, 2 << 20
"""Tokens of a distribution of the original that are kept, fewer where the text is long: bytes of all of them."""
LARGEST_LOSS = 709.0
"""In nats: e to the power of more is no float."""
LEAST_REST = 1e-12
"""Less than this is no probability: what all other tokens have is one minus a sum."""


@dataclass(slots=True)
class Measured:
    """What both made of the text; positions that were not heard are NaN."""

    tokens: npt.NDArray[np.int64]
    """[W, L]."""
    losses: npt.NDArray[np.float64]
    """[W, L - 1] nats."""
    original: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]
    divergence: npt.NDArray[np.float64]
    agrees: npt.NDArray[np.bool_]
    likely: npt.NDArray[np.int32]
    """[W, L - 1, K] tokens that the original thinks most likely."""
    likely_logprobs: npt.NDArray[np.float32]
    """[W, L - 1, K]: what it says of them."""
    rest_logprobs: npt.NDArray[np.float32]
    """[W, L - 1]: of all others together; minus infinity where that is nothing."""
    likely_divergence: npt.NDArray[np.float64]
    """The divergence over those tokens and the rest."""

    @classmethod
    def of(cls, windows: npt.NDArray[np.int64], vocab_size: int) -> Measured:
        """Nothing heard yet of `windows` [W, L]."""
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
        """Note what `ours` and `theirs`, logits [R, vocab], say of what follows R positions `at` windows and places.

        Both are overwritten, as `scratch` [R, vocab] is.
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
        """Note the original's likeliest tokens, from log-probabilities [R, vocab] of the package and of itself."""
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
    """How many tokens of each distribution of the original are kept."""
    size = np.dtype(id_type(vocab_size)).itemsize + np.dtype(np.float32).itemsize
    return max(1, min(MOST_LIKELY, vocab_size, LIKELY_BYTES // (max(1, positions) * size)))


def id_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest type that a package keeps tokens in."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def perplexity(loss: float) -> float:
    """e to the power of a loss, or of the difference of two; the largest float where that is beyond it."""
    return math.exp(min(loss, LARGEST_LOSS))


def quality_of(text: Text, found: Measured, provider: str) -> Quality:
    """The figures."""
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
    """The figures of each half of the windows, where they are read by different graphs."""
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
