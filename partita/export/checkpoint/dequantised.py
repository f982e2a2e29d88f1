"""Load the source model of a quantised checkpoint in float32, without the library of its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.original import auto_class
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo


@dataclass(frozen=True, slots=True)
class _Unread:
    """A lazy tensor of the checkpoint, which transformers reads with `tensor[...]`."""

    info: TensorInfo
    files: OpenFiles

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = self.files.read(self.info, tuple((0, size) for size in self.info.shape))
        taken = whole if index is Ellipsis else whole[index]
        return taken.contiguous()  # parameters keep the strides of their input


def load(checkpoint: Checkpoint, config: PreTrainedConfig) -> Any:
    """The model in float32 with its default attention, and transformers' loading info. Raises as transformers does."""
    with torch.device("meta"):
        kind = type(auto_class(config).from_config(config))
    with OpenFiles(checkpoint.folder) as files:
        return kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _Unread(info, files) for name, info in checkpoint.tensors.items()},
            dtype=torch.float32,
            attn_implementation=None,
            output_loading_info=True,
        )
