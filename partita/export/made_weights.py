"""The original model with weights that no file holds as they are: those that an adapter changes."""

from __future__ import annotations

from typing import Any

import torch

from partita.export.checkpoint import Checkpoint
from partita.export.naming import match_names
from partita.export.origins import blocks
from partita.export.weight_files import OpenFiles

BLOCK_ELEMENTS = 4 << 20


def put_made(model: Any, checkpoint: Checkpoint) -> None:
    """Give `model`, of transformers and in float32, the weights of `checkpoint` that are made, in place.

    Parameters that were tied and now have values of their own become parameters of their own.
    """
    if not any(info.decoder for info in checkpoint.tensors.values()):
        return
    sources = match_names(model, checkpoint.tensors)
    with torch.no_grad(), OpenFiles(checkpoint.folder) as files:
        for name, origin in sources.found.items():
            if not any(info.decoder for info in origin.tensors()):
                continue
            parent, _, last = name.rpartition(".")
            module = model.get_submodule(parent)
            if sources.tied.get(name):
                own = torch.nn.Parameter(getattr(module, last).detach().clone(), requires_grad=False)
                setattr(module, last, own)
            value = getattr(module, last).detach()
            for region in blocks(origin.shape, BLOCK_ELEMENTS):
                value[tuple(slice(start, stop) for start, stop in region)] = origin.read(region, files)
