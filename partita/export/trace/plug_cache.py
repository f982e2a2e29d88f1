"""The transformers cache that a model is given: it holds nothing and hands every tensor on to the plug.

It behaves as transformers' static cache does: keys and values come back over all N rows, whatever was written so far,
and the model's masks say which of them count. Convolution and recurrent states behave as those of a layer that has read
tokens before: a state of zeros is the same as none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from partita.errors import UnsupportedModelError
from partita.export.trace.hooks import Plug


class _NoLayers(list[Any]):
    """The layers of a cache that has none: a model that looks into one is refused by name."""

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedModelError(
            "the model accesses the layers of transformers' cache directly (it expects its own cache class); "
            "that cannot be "
            "exported yet"
        )


class PlugCache(Cache):
    """A cache whose states live elsewhere; `hides_recurrent` when a recurrence goes on from its state by itself."""

    def __init__(self, plug: Plug, *, hides_recurrent: bool = False) -> None:
        super().__init__(layers=_NoLayers())
        self.plug, self.hides_recurrent = plug, hides_recurrent

    def __len__(self) -> int:
        return self.plug.count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all N rows, with the new ones in their places."""
        return self.plug.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens read before this step."""
        return self.plug.length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Length of the cache in tokens, N; transformers asks for it."""
        return self.plug.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask covers, and the index of the first."""
        return self.plug.max_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Tokens read before this step, for models that count from them; our masks take positions from the graph."""
        return self.plug.length()

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops old keys: windows are the lowering's business."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers are linear is the model's business."""
        return [False] * len(self)

    @property
    def is_compileable(self) -> bool:
        """True, so that models take the path they take for static caches."""
        return True

    @property
    def is_initialized(self) -> bool:
        """True: nothing is allocated lazily."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: no states are kept to go back to."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has a state to go on from."""
        layer, index = layer_idx or 0, state_idx or 0
        return any(self.plug.read_state(kind, layer, index) is not None for kind in ("conv", "recurrent"))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[B, channels, kernel]; models write into it."""
        return self.plug.read_state("conv", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Put new columns [B, channels, S] behind the state, keep the last ones; gives all of them."""
        size = kwargs.get("conv_kernel_size")
        past = self.plug.read_state("conv", layer_idx, state_idx)
        if past is None:
            kept = conv_states
            missing = (size or 0) - conv_states.shape[-1]
            if missing > 0:
                kept = torch.nn.functional.pad(conv_states, (missing, 0))
            self.plug.write_state("conv", layer_idx, state_idx, kept[..., -(size or kept.shape[-1]) :])
            return kept
        full = torch.cat([past, conv_states.to(past.dtype)], dim=-1)
        self.plug.write_state("conv", layer_idx, state_idx, full[..., -past.shape[-1] :])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[B, ...]; models write into it."""
        state = self.plug.read_state("recurrent", layer_idx, state_idx)
        return None if self.hides_recurrent else state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take the new recurrent state of a layer in place of the old one."""
        self.plug.write_state("recurrent", layer_idx, state_idx, recurrent_states)
        return recurrent_states

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise UnsupportedModelError(
            "the model caches the keys of a sparse attention indexer; that cannot be exported yet"
        )
