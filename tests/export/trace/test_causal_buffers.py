"""A causal mask that is a buffer of the model is read at the tokens' positions, and nothing else is changed."""

from __future__ import annotations

import torch

from partita.export.trace.replacements import rows_by_position

KEYS = 6


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Buffer(torch.ones(8, 8, dtype=torch.bool).tril()[None, None])


def test_the_last_rows_are_those_of_the_positions() -> None:
    model, positions = Model(), torch.tensor([[1, 2], [4, 5]])
    with rows_by_position(model, positions, KEYS):
        found = model.bias[:, :, KEYS - 2 : KEYS, :KEYS]
    assert found.shape == (2, 1, 2, KEYS)
    assert torch.equal(found[:, 0], torch.arange(KEYS) <= positions[..., None])


def test_every_other_cut_stays() -> None:
    model, positions = Model(), torch.tensor([[1, 2]])
    other = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    with rows_by_position(model, positions, KEYS):
        assert torch.equal(model.bias[:, :, 0:2, :KEYS][0, 0], torch.arange(KEYS) <= torch.tensor([[0], [1]]))
        assert torch.equal(model.bias[:, :, KEYS - 2 : KEYS, :4], torch.ones(1, 1, 2, 4, dtype=torch.bool))
        assert other[:, :, KEYS - 2 : KEYS, :KEYS].shape == (1, 1, 2, KEYS)
    assert model.bias[:, :, KEYS - 2 : KEYS, :KEYS].shape == (1, 1, 2, KEYS)
