"""What Partita registers with transformers: an attention function and a mask function.

transformers routes attention calls through `AttentionInterface`, masks through `AttentionMaskInterface`, and keys,
values and other states through a `Cache` (`plug_cache.py`). Plugging in our own at these public points is all that is
needed to see, and to replace, what a decoder does with its cache; no model is named here. Models that choose their
attention by class have transformers' default one, whose calls of torch's scaled_dot_product_attention are replaced.

The mask a model asks for decides which keys a query sees: transformers' eager attention looks at nothing else. Our mask
function gives the model the mask that eager attention would get, over all N rows of the cache. When the very same
tensor arrives at the attention function, what it says is known as a rule (causal, a sliding window), and a lowering may
write the rule; when the model has computed with it (a position bias, say), the tensor itself is what counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from partita.errors import UnsupportedModelError

FAR = 1 << 20
"""A token that is beyond any window."""
SDPA = torch.nn.functional.scaled_dot_product_attention
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
        "is_decoder",
        "layer_idx",
    }
)
"""Keywords that transformers passes through to the attention function and that its eager attention ignores."""

MaskFunction = Callable[..., Any]
"""transformers' index mask function: batch, head, query and key index -> may the query see the key?"""


@dataclass(frozen=True)
class MaskRule:
    """A mask in words: causal, and within `window` keys if that is not None."""

    window: int | None
    everywhere: bool = True
    """It says so of texts of any length, and not of those of a cache of N rows alone."""


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """One attention call, with every keyword accounted for.

    query [B, H, S, D]; key [B, Hkv, N, D] and value [B, Hkv, N, Dv] over all rows of the cache; mask [B or 1, H or 1,
    S, N], added to the scores; sink [H] or None: the score of a key that is always there and has no value.
    """

    module: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    scale: float
    softcap: float
    sink: torch.Tensor | None


class Plug(Protocol):
    """What the registered functions and the cache talk to while a model runs."""

    max_length: int
    """N."""
    count: int
    """Layers that a cache for the model has."""
    last_state: torch.Tensor | None
    """The recurrent state that the model has read last."""

    def mask(self, mask_function: MaskFunction, dtype: torch.dtype) -> torch.Tensor:
        """The mask that `mask_function` describes, [B, 1, S, N], 0 where a query sees a key."""

    def attend(self, request: AttentionRequest) -> torch.Tensor:
        """The attention output [B, S, H, Dv]."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache new keys [B, Hkv, S, D] and values [B, Hkv, S, Dv]; gives those of all N rows."""

    def length(self) -> Any:
        """Tokens in the cache before this step."""

    def read_state(self, kind: str, layer: int, index: int) -> torch.Tensor | None:
        """A convolution or recurrent state; None when there is none yet."""

    def write_state(self, kind: str, layer: int, index: int, state: torch.Tensor) -> None:
        """Keep a convolution or recurrent state."""


_active: list[Plug] = []


class _Ones(TorchFunctionMode):
    """Remembers tensors of ones: a padding mask that a model makes of them, for want of one, masks nothing.

    Calls of torch's scaled_dot_product_attention with a mask go to our attention function.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        """By identity, with the tensor's version; the tensors are kept, as an identity is good while its object lives.
        """

    def knows(self, tensor: Any) -> bool:
        """True for a tensor of ones that nobody has written to since."""
        made = self._made.get(id(tensor))
        return made is not None and made[1] == tensor._version

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is SDPA and (output := _sdpa(*args, **(kwargs or {}))) is not None:
            return output
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        same = name in ("to", "bool", "long", "int", "contiguous") and bool(args) and self.knows(args[0])
        if isinstance(result, torch.Tensor) and (same or name in ("ones", "new_ones", "ones_like")):
            self._made[id(result)] = result, result._version
        return result


_ones: list[_Ones] = []


@contextmanager
def plugged(plug: Plug) -> Iterator[None]:
    """Let the registered functions talk to `plug` for the length of the block.

    Models that choose their attention by class know no name but transformers' own, and get our masks.
    """
    _active.append(plug)
    _ones.append(_Ones())
    try:
        with _ones[-1], _replaced(lambda _: _mask):
            yield
    finally:
        _ones.pop()
        _active.pop()


def _sdpa(
    query: torch.Tensor, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **keywords: Any
) -> torch.Tensor | None:
    """torch's attention [B, H, S, Dv] by our function; None for a call without a mask of four axes."""
    if attn_mask is None or attn_mask.ndim != 4:
        return None
    module, scale = torch.nn.Module(), keywords.get("scale")
    return _attention(module, query, key, value, attn_mask, scale, dropout_p)[0].transpose(1, 2)


@contextmanager
def mask_functions() -> Iterator[list[MaskFunction]]:
    """Collect the mask functions that models with transformers' own attention ask for in the block."""
    found: list[MaskFunction] = []

    def collecting(make: Callable[..., Any], *args: Any, mask_function: MaskFunction, **kwargs: Any) -> Any:
        found.append(mask_function)
        return make(*args, mask_function=mask_function, **kwargs)

    with _replaced(lambda make: partial(collecting, make)):
        yield found


@contextmanager
def _replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the mask functions of eager and sdpa attention in the block."""
    masks: Any = AttentionMaskInterface._global_mapping
    own = {name: masks[name] for name in ("eager", "sdpa")}
    masks.update({name: replace(make) for name, make in own.items()})
    try:
        yield
    finally:
        masks.update(own)


def first_hidden(mask_function: MaskFunction, max_length: int) -> tuple[int, bool] | None:
    """The first query that does not see all keys before it, and whether it sees its own key only (attention chunks).

    That is the number of tokens in a window or chunk. None when every query of `max_length` sees all keys before it, or
    the function cannot be evaluated.
    """
    zero = torch.zeros((), dtype=torch.long)

    def visible(query: int) -> int:
        keys = torch.arange(query + 1)
        return int(torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, query), keys)).sum())

    try:
        found = bisect.bisect_left(range(max_length), True, key=lambda query: visible(query) <= query)
        return None if found == max_length else (found, visible(found) == 1 < found)
    except Exception:  # noqa: BLE001 - functions may index tensors of the run
        return None


def last_state() -> torch.Tensor | None:
    """The recurrent state that the running model has read last; None when its layer has none yet."""
    return _active[-1].last_state


def register() -> None:
    """Register our attention and mask functions with transformers; doing it twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def classify_mask(mask_function: MaskFunction, max_length: int) -> MaskRule | None:
    """Find out what an index mask function allows, by asking it about a few queries among `max_length` keys.

    None when it is neither causal nor a causal sliding window, or when it depends on more than the positions: then only
    the mask itself says what it is. Raises UnsupportedModelError when a query sees what comes after it: rows of the
    cache that are not written yet.
    """
    with unset_fake_temporarily():
        zero, keys = torch.zeros((), dtype=torch.long), torch.arange(max_length)

        def allowed(query: int) -> torch.Tensor:
            row = mask_function(zero, zero, torch.full_like(keys, query), keys)
            return torch.as_tensor(row).expand(max_length).to(torch.bool)

        try:
            window = int(allowed(max_length - 1).sum())
        except DataDependentOutputException:
            return None  # it indexes tensors of the run, which are fake in a probe
        edges = (0, 1, window - 1, window, window + 1, max_length // 2, max_length - 1)
        regular = True
        for query in sorted({q for q in edges if 0 <= q < max_length}):
            row = allowed(query)
            if bool((row & (keys > query)).any()):
                raise UnsupportedModelError(
                    f"the model asks for an attention mask in which a token attends to later ones (query {query} of "
                    f"{max_length}); only causal masks can be exported"
                )
            regular = regular and torch.equal(row, (keys <= query) & (keys > query - window))
        everywhere = window < max_length or _is_causal_beyond(mask_function)
    if not regular:
        return None
    return MaskRule(None if window >= max_length else window, everywhere)


def _is_causal_beyond(mask_function: MaskFunction) -> bool:
    """Whether a token far beyond any cache of ours attends to all before it, and not to a window of them."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(FAR + 1)
    try:
        return bool(torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, FAR), keys)).to(torch.bool).all())
    except Exception:  # noqa: BLE001 - a model's own function, which may know nothing of so long a text
        return False


def additive_mask(
    mask_function: MaskFunction, positions: torch.Tensor, max_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """The mask of eager attention for queries at `positions` [B, S] over N keys: [B, 1, S, N], 0 or the lowest."""
    rows = torch.arange(positions.shape[0], dtype=positions.dtype)[:, None, None, None]
    keys = torch.arange(max_length, dtype=positions.dtype)[None, None, None, :]
    queries = positions[:, None, :, None]
    allowed = mask_function(rows, torch.zeros_like(rows), queries, keys)
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), torch.finfo(dtype).min, dtype=dtype))


def _mask(*args: Any, mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    """Registered mask function."""
    padding = kwargs.get("attention_mask")
    if padding is not None and not _ones[-1].knows(padding):
        raise UnsupportedModelError("the model builds a padding mask of its own; that cannot be exported yet")
    return _active[-1].mask(mask_function, dtype)


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
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Registered attention function: checks that nothing the model asks for is lost, then asks the active plug."""
    name = type(module).__name__
    unknown = sorted(k for k, v in keywords.items() if v is not None and k not in HARMLESS_KEYWORDS)
    if unknown:
        raise UnsupportedModelError(
            f"{name} passes {', '.join(unknown)} to its attention function, which has no lowering yet"
        )
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 4:
        raise UnsupportedModelError(
            f"{name} attends without a mask; only masks made by transformers' mask functions can be exported"
        )
    if dropout or is_causal is False:
        raise UnsupportedModelError(
            f"{name} asks for {'dropout' if dropout else 'attention that is not causal'} at inference"
        )
    if attention_mask.dtype == torch.bool:
        lowest = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype)
        attention_mask = torch.where(attention_mask, torch.zeros((), dtype=query.dtype), lowest)
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    request = AttentionRequest(name, query, key, value, attention_mask, scale, float(softcap or 0.0), s_aux)
    # As eager attention gives it: some models take a view of it.
    return _active[-1].attend(request).contiguous(), None
