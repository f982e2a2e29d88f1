"""Weights that a model ties and its checkpoint holds twice: tied only where both are equal, as transformers does.

transformers compares what it has loaded (`PreTrainedModel.tie_weights`) and keeps both where they differ, whatever
`tie_word_embeddings` says. Both are compared here in float32, in which the original model runs, so that the precision
of a package does not decide which weights it has.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.trace.fake_model import FakeModel
from partita.export.weights.origins import Origin, blocks

BLOCK_ELEMENTS = 8 << 20


def untie(fake: FakeModel, checkpoint: Checkpoint) -> list[str]:
    """Give parameters of their own to what the checkpoint holds with values of its own; notes on which."""
    model = fake.module
    assert isinstance(model, PreTrainedModel)
    pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if not pairs:
        return []
    found, notes = match_names(model, checkpoint.tensors).found, []
    for target, source in pairs.items():
        if target not in found or source not in found or _equal(found[target], found[source], checkpoint):
            continue
        parent, _, name = target.rpartition(".")
        old = model.get_parameter(target)
        with fake.mode:
            data = torch.empty(old.shape, dtype=old.dtype)
        setattr(model.get_submodule(parent), name, torch.nn.Parameter(data, requires_grad=False))
        notes.append(
            f"{target} is taken from the weight files, where it differs from {source}; config.json ties them "
            "(tie_word_embeddings), which transformers ignores in this case, too"
        )
    return notes


def _equal(one: Origin, other: Origin, checkpoint: Checkpoint) -> bool:
    """Whether two weights have the same shape and, in float32, the same values."""
    if one.shape != other.shape:
        return False
    with OpenFiles(checkpoint.folder) as files:
        return all(
            torch.equal(one.read(region, files).float(), other.read(region, files).float())
            for region in blocks(one.shape, BLOCK_ELEMENTS)
        )
