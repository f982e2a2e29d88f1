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

    @property
    def perplexity_ratio(self) -> float:
        """1 is no loss."""
        return self.perplexity / self.original_perplexity
