"""Calls a model with a cache, whatever the names of the arguments of its `forward`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from partita.errors import UnsupportedModelError

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
    """Logits [B, K, vocab] for the tokens `ids` [B, S] at `positions` [B, S]; `rows` [K]: indices into S; None: all.

    `keys`: length of the padding mask of ones that the model gets; None: no mask. Raises UnsupportedModelError for a
    model without a cache, and for one that requires inputs other than text.
    """
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
