"""A transformers cache that forwards every tensor to the plug.

It behaves like transformers' static cache: keys and values of all N rows are returned, and the masks select the valid
ones. Convolution and recurrent states are those of a layer with earlier tokens; a state of zeros equals no state.

Calls a model with a cache, whatever the names of the arguments of its `forward`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from partita.errors import UnsupportedModelError
from partita.export.trace.hooks import Plug


class _NoLayers(list[Any]):
    """The layers of a cache without layers: access raises UnsupportedModelError."""

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedModelError(
            "the model accesses the layers of transformers' cache directly (it expects its own cache "
            "class), which is not supported"
        )


class PlugCache(Cache):
    """A cache whose states are held by the plug. `hides_recurrent`: recurrences read their state themselves."""

    def __init__(self, plug: Plug, *, hides_recurrent: bool = False) -> None:
        super().__init__(layers=_NoLayers())
        self.plug, self.hides_recurrent = plug, hides_recurrent

    def __len__(self) -> int:
        return self.plug.count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all N rows, including the new ones."""
        return self.plug.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens before this step."""
        return self.plug.length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """N, the length of the cache in tokens."""
        return self.plug.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a mask covers, and the index of the first."""
        return self.plug.max_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Tokens before this step, for models that count from them; our masks use the positions input."""
        return self.plug.length()

    is_sliding = is_linear = property(lambda self: [False] * len(self))
    """The lowering handles windows, and the model its linear layers."""
    is_compileable = True
    """Models use their code path for static caches."""
    is_initialized = True
    """Nothing is allocated lazily."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: no states are recorded for a rewind."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has a state to continue from."""
        layer, index = layer_idx or 0, state_idx or 0
        return any(self.plug.read_state(kind, layer, index) is not None for kind in ("conv", "recurrent"))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[B, channels, kernel]; models write into it."""
        return self.plug.read_state("conv", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Append new columns [B, channels, S] to the state and store the last ones; returns all of them."""
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
        """Replace the recurrent state of a layer."""
        self.plug.write_state("recurrent", layer_idx, state_idx, recurrent_states)
        return recurrent_states

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("the model caches the keys of a sparse attention indexer, which is not supported")


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument of `forward`, newest first: `cache` since transformers 5.24."""


def cache_argument(model: torch.nn.Module) -> str | None:
    """The name of the cache argument of `model.forward`; None without a cache."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), None)


def call(
    model: torch.nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    rows: torch.Tensor | None,
    keys: int | None = None,
) -> torch.Tensor:
    """Logits [B, K, vocab] of `ids` [B, S]; `rows` [K] or all; `keys`: mask length. Raises UnsupportedModelError."""
    known = inspect.signature(model.forward).parameters
    required = [key for key, one in known.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if needed := [key for key in required if key != "input_ids"]:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on text alone: it also requires {' and '.join(needed)}"
        )
    name = cache_argument(model)
    if name is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no cache argument, so it cannot be traced with a static cache"
        )
    arguments: dict[str, Any] = {name: cache, "use_cache": True}
    mask = None if keys is None else torch.ones(ids.shape[0], keys, dtype=torch.long)
    for key, value in {"position_ids": positions, "attention_mask": mask, "logits_to_keep": rows}.items():
        if key in known and not (key == "logits_to_keep" and rows is None):
            arguments[key] = value
    logits: torch.Tensor = model(input_ids=ids, **arguments).logits
    return logits if rows is None or "logits_to_keep" in known else logits.index_select(1, rows)
