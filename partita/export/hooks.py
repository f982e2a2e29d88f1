"""What Partita registers with transformers: an attention function, a mask function and a cache.

transformers routes every attention call through `AttentionInterface`, every mask through `AttentionMaskInterface` and
every key and value through a `Cache`. Plugging in our own at these three public points is all that is needed to see,
and to replace, what a decoder does with its cache; no model is named here.

The mask a model asks for decides which keys a query sees: transformers' eager attention looks at nothing else. So a
sliding window is read from the mask, not from the `sliding_window` keyword, which several models pass without using it
or use without passing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from transformers import AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from partita.errors import UnsupportedModelError

IMPLEMENTATION = "partita"
"""The name under which our functions are registered with transformers."""

HARMLESS_KEYWORDS = frozenset(
    {
        "sliding_window",  # repeats what the mask says; see the module docstring
        "position_ids",  # already applied to query and key
        "position_embeddings",  # likewise
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    }
)
"""Keywords that transformers passes through to the attention function and that its eager attention ignores."""


@dataclass(frozen=True)
class MaskRule:
    """The mask a model asked for, in place of a mask tensor: causal, and within `window` keys if that is not None.

    Model code that computes with the mask itself (adds a position bias to it, say) is refused by name: what it does
    there would be lost.
    """

    window: int | None

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            "the model computes with its attention mask (a position bias, or attention of its own); that cannot be "
            "exported yet"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __invert__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """One attention call, with every keyword accounted for. Shapes as in `AttentionCall`."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float
    rule: MaskRule


Handler = Callable[[AttentionRequest], torch.Tensor]
"""Answers an attention request with the output [B, S, H, Dv]."""
ReadMask = Callable[[Callable[..., Any]], MaskRule]
"""Turns transformers' index mask function into a rule."""


@dataclass(slots=True)
class Plug:
    """What the registered functions talk to while a model runs."""

    handler: Handler
    read_mask: ReadMask
    max_length: int
    layer: int | None = None
    """Layer whose keys and values were handed to the cache last."""
    updates: list[tuple[int, torch.Size, torch.Size]] = field(default_factory=list)


_active: list[Plug] = []


@contextmanager
def plugged(plug: Plug) -> Iterator[Plug]:
    """Let the registered functions talk to `plug` for the length of the block."""
    _active.append(plug)
    try:
        yield plug
    finally:
        _active.pop()


def register() -> None:
    """Register our attention and mask functions with transformers; doing it twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def classify_mask(mask_function: Callable[..., Any], max_length: int) -> MaskRule:
    """Find out what an index mask function allows, by asking it about a few queries among `max_length` keys.

    Raises UnsupportedModelError when the mask is neither causal nor a causal sliding window.
    """
    with unset_fake_temporarily():
        zero, keys = torch.zeros((), dtype=torch.long), torch.arange(max_length)

        def allowed(query: int) -> torch.Tensor:
            row = mask_function(zero, zero, torch.full_like(keys, query), keys)
            return torch.as_tensor(row).expand(max_length).to(torch.bool)

        try:
            window = int(allowed(max_length - 1).sum())
        except DataDependentOutputException as error:
            raise UnsupportedModelError(
                "the model asks for an attention mask that depends on the tokens or their padding (chunked "
                "attention, say), and "
                "is neither causal nor a sliding window; such masks cannot be exported yet"
            ) from error
        for query in {
            q for q in (0, 1, window - 1, window, window + 1, max_length // 2, max_length - 1) if 0 <= q < max_length
        }:
            if not torch.equal(allowed(query), (keys <= query) & (keys > query - window)):
                raise UnsupportedModelError(
                    "the model asks for an attention mask that is neither causal nor a sliding window (query "
                    f"{query} of "
                    f"{max_length}); such masks cannot be exported yet"
                )
    return MaskRule(None if window >= max_length else window)


def _mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskRule:
    """Registered mask function: hands on a rule where transformers expects a tensor."""
    if kwargs.get("attention_mask") is not None:
        raise UnsupportedModelError("the model builds a padding mask of its own; that cannot be exported yet")
    return _active[-1].read_mask(mask_function)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Registered attention function: checks that nothing the model asks for is lost, then asks the active plug."""
    plug = _active[-1]
    name = type(module).__name__
    unknown = sorted(k for k, v in keywords.items() if v is not None and k not in HARMLESS_KEYWORDS)
    if unknown:
        raise UnsupportedModelError(
            f"{name} passes {', '.join(unknown)} to its attention function, which has no lowering yet"
        )
    if not isinstance(attention_mask, MaskRule):
        raise UnsupportedModelError(
            f"{name} computes with the attention mask or does without one; only masks made by transformers' mask "
            "functions "
            "can be exported"
        )
    if dropout or is_causal is False:
        raise UnsupportedModelError(
            f"{name} asks for {'dropout' if dropout else 'attention that is not causal'} at inference"
        )
    if plug.layer is None:
        raise UnsupportedModelError(
            f"{name} attends without writing the cache; shared or cross attention has no lowering yet"
        )
    layer, plug.layer = plug.layer, None
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    request = AttentionRequest(layer, query, key, value, scale, float(softcap or 0.0), attention_mask)
    return plug.handler(request), None


class PlugCache(Cache):
    """A transformers cache that holds nothing: it tells the plug which layer comes next and hands the tensors on."""

    def __init__(self, plug: Plug, layers: int) -> None:
        super().__init__(layers=[])
        self.plug, self.count = plug, layers

    def __len__(self) -> int:
        return self.count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember the layer; the attention function that follows writes the static cache."""
        self.plug.layer = layer_idx
        self.plug.updates.append((layer_idx, key_states.shape, value_states.shape))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are a graph input, so no model has to ask the cache for them."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """N."""
        return self.plug.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask covers, and the index of the first."""
        return self.plug.max_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, for the same reason as `get_seq_length`."""
        return 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops old keys: windows are the lowering's business."""
        return [False] * self.count

    @property
    def is_compileable(self) -> bool:
        """True, so that models take the path they take for static caches."""
        return True

    @property
    def is_initialized(self) -> bool:
        """True: nothing is allocated lazily."""
        return True

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"the model caches {what}; only keys and values can be exported yet")

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise self._refuse("a convolution state")

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise self._refuse("a convolution state")

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise self._refuse("a recurrent state")

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise self._refuse("a recurrent state")

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name: only linear attention asks."""
        raise self._refuse("a recurrent state")

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Refused by name."""
        raise self._refuse("the keys of a sparse attention indexer")
