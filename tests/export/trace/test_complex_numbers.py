"""Pairs of real numbers compute what complex numbers compute, and refuse what they do not know."""

from __future__ import annotations

import pytest
import torch

from partita.errors import UnsupportedModelError
from partita.export.trace.replacements import complex_as_pairs


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """A rotary embedding as llama4 and deepseek_v2 write it."""
    factor = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factor[:, :, None, :]).flatten(3)


def test_a_rotation() -> None:
    x, angle = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4)
    wanted = rotated(x, angle)
    with complex_as_pairs():
        found = rotated(x, angle)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_indices_of_every_kind() -> None:
    x = torch.randn(2, 3, 4, 2)
    whole = torch.view_as_complex(x)
    with complex_as_pairs():
        pairs = torch.view_as_complex(x)
        for index in (0, (slice(None), 1), (..., 0), (slice(None), None, slice(1, 3))):
            assert torch.equal(torch.view_as_real(pairs[index]), torch.view_as_real(whole[index]))
        assert torch.equal(torch.view_as_real(pairs.unsqueeze(-1)), torch.view_as_real(whole.unsqueeze(-1)))


def test_what_is_not_known_is_refused() -> None:
    with complex_as_pairs():
        pairs = torch.view_as_complex(torch.randn(3, 2))
        with pytest.raises(UnsupportedModelError, match=r"complex numbers \(conj\)"):
            pairs.conj()
        with pytest.raises(UnsupportedModelError, match=r"complex numbers \(abs\)"):
            torch.abs(pairs)
