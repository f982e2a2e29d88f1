"""What each layer of a model caches: found by running the model once on fake tensors, never read from a config.

Fake tensors have shapes and no data, so the probe costs no memory and works for a model of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from partita.errors import UnsupportedModelError
from partita.export.hooks import AttentionRequest, Plug, PlugCache, classify_mask, plugged

PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class LayerState:
    """Keys and values of one layer."""

    layer: int
    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None
    """Sliding window in tokens; None when every earlier key is seen, or when the cache is not longer than the
    window.
    """


def probe_layers(model: torch.nn.Module, fake: FakeTensorMode, batch: int, max_length: int) -> tuple[LayerState, ...]:
    """Run `model` once under `fake` and return the state of each layer, in layer order.

    Raises UnsupportedModelError when the model does not cache keys and values through transformers' interfaces.
    """
    found: dict[int, LayerState] = {}

    def record(request: AttentionRequest) -> torch.Tensor:
        if request.layer in found:
            raise UnsupportedModelError(f"layer {request.layer} attends twice in one step; that cannot be exported yet")
        found[request.layer] = LayerState(
            layer=request.layer,
            query_heads=request.query.shape[1],
            kv_heads=request.key.shape[1],
            key_width=request.key.shape[-1],
            value_width=request.value.shape[-1],
            window=request.rule.window,
        )
        shape = request.query.shape
        return request.query.new_zeros(shape[0], shape[2], shape[1], request.value.shape[-1])

    plug = Plug(record, lambda function: classify_mask(function, max_length), max_length)
    with plugged(plug), fake, torch.no_grad():
        ids = torch.zeros(batch, min(PROBE_TOKENS, max_length), dtype=torch.long)
        positions = torch.zeros_like(ids)
        model(input_ids=ids, position_ids=positions, past_key_values=PlugCache(plug, _layers(model)), use_cache=True)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not route its attention through transformers' AttentionInterface, or has "
            "none; "
            "it cannot be traced with a static cache"
        )
    if sorted(found) != list(range(len(found))) or len(plug.updates) != len(found):
        raise UnsupportedModelError(
            f"{type(model).__name__} caches {len(plug.updates)} layers but attends in layers {sorted(found)}; "
            "layers that "
            "share or skip the cache cannot be exported yet"
        )
    return tuple(found[layer] for layer in sorted(found))


def _layers(model: torch.nn.Module) -> int:
    """Layer count that a cache for `model` is made with."""
    config = model.config
    return int(config.get_text_config().num_hidden_layers)  # type: ignore[union-attr, operator]
