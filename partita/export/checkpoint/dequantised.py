"""The model of the numbers that the weights of a quantised checkpoint stand for, without the library of its format.

transformers loads it by its own rules from tensors that are computed when it asks for them, one after the other.
"""

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
    """A tensor of the checkpoint that is yet to be read: what transformers asks of one is `tensor[...]`."""

    info: TensorInfo
    files: OpenFiles

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = self.files.read(self.info, tuple((0, size) for size in self.info.shape))
        taken = whole if index is Ellipsis else whole[index]
        return taken.contiguous()  # parameters lie in memory as they are given


def load(checkpoint: Checkpoint, config: PreTrainedConfig) -> Any:
    """The model in float32 with its default attention, and transformers' loading info. Raises what it raises."""
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
