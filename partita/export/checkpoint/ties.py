"""Unties weights that the config ties and the checkpoint stores with different values.

transformers compares them after loading (`PreTrainedModel.tie_weights`). They are compared here in float32, so that the
precision of the package does not decide.
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
    """Untie parameters whose stored values differ; returns a note for each."""
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
            f"{target} differs from {source} in the weight files, so they are not tied; config.json ties "
            "them (tie_word_embeddings), but transformers ignores that here"
        )
    return notes


def _equal(one: Origin, other: Origin, checkpoint: Checkpoint) -> bool:
    """Whether two weights have the same shape and float32 values."""
    if one.shape != other.shape:
        return False
    with OpenFiles(checkpoint.folder) as files:
        return all(
            torch.equal(one.read(region, files).float(), other.read(region, files).float())
            for region in blocks(one.shape, BLOCK_ELEMENTS)
        )
