"""What reading a text with a package gives; apart from `evaluate`, so that no ONNX Runtime is needed to name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A package beside its original."""

    provider: str
    tokens: int
    """Tokens that were predicted."""
    perplexity: float
    original_perplexity: float
    top1_agreement: float
    """Share of the tokens of which both think the same most likely, from 0 to 1."""
    kl_mean_at_least: float | None = None
    """Kullback-Leibler divergence of the package from the original in nats, mean over the tokens, with all but the
    original's likeliest tokens taken as one: at most the divergence over the whole vocabulary. None where the package
    does not keep what that takes; so are the next ones.
    """
    kl_p99_at_least: float | None = None
    """Its 99th percentile."""
    kl_tokens: int | None = None
    """How many tokens are told apart."""
    kl_share: float | None = None
    """Of the original's probability that they have, mean over the positions."""

    @property
    def perplexity_ratio(self) -> float:
        """1 is no loss."""
        return self.perplexity / self.original_perplexity
