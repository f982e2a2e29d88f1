"""The attention and mask functions registered with transformers.

transformers passes attention calls to `AttentionInterface`, masks to `AttentionMaskInterface`, and keys, values and
other states to a `Cache` (`state.py`). Replacing these three captures a decoder's use of its cache without naming
models. Models that choose attention by class use transformers' default, whose calls of torch's
scaled_dot_product_attention are replaced.

The mask function returns the mask of eager attention over all N cache rows. When the attention function gets this
tensor unmodified, its rule is known (causal, sliding window), and a lowering may write the rule. If the model has
modified it (e.g. by a position bias), the tensor is used.
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
from partita.export.trace.attention import AttentionRequest

FAR = 1 << 20
"""A token beyond any window."""
SDPA = torch.nn.functional.scaled_dot_product_attention
IMPLEMENTATION = "partita"
"""The name of the functions registered with transformers."""

HARMLESS_KEYWORDS = frozenset(
    {
        "sliding_window",  # repeats the mask
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
"""Keywords that transformers passes to the attention function and that its eager attention ignores."""

MaskFunction = Callable[..., Any]
"""transformers' index mask function: batch, head, query and key index -> may the query see the key?"""


@dataclass(frozen=True)
class MaskRule:
    """The rule of a mask: causal, and within `window` keys if that is not None."""

    window: int | None
    any_length: bool = True
    """The rule holds for any length, not only for a cache of N rows."""


class Plug(Protocol):
    """The interface used by the registered functions and the cache while a model runs."""

    max_length: int
    """N."""
    count: int
    """Number of layers of the model's cache."""
    last_state: torch.Tensor | None
    """The recurrent state that the model read last."""

    def mask(self, mask_function: MaskFunction, dtype: torch.dtype) -> torch.Tensor:
        """The mask of `mask_function`, [B, 1, S, N], 0 where a query sees a key."""

    def attend(self, request: AttentionRequest) -> torch.Tensor:
        """The attention output [B, S, H, Dv]."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache new keys [B, Hkv, S, D] and values [B, Hkv, S, Dv]; returns those of all N rows."""

    def length(self) -> Any:
        """Tokens in the cache before this step."""

    def read_state(self, kind: str, layer: int, index: int) -> torch.Tensor | None:
        """A convolution or recurrent state; None without one."""

    def write_state(self, kind: str, layer: int, index: int, state: torch.Tensor) -> None:
        """Store a convolution or recurrent state."""


_active: list[Plug] = []


class _Ones(TorchFunctionMode):
    """Tracks tensors of ones: a padding mask made of them masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        """By identity, with the tensor's version; the tensors are kept alive, so that identities stay valid."""

    def knows(self, tensor: Any) -> bool:
        """Whether it is a tensor of ones that was not modified."""
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
def connect_plug(plug: Plug) -> Iterator[None]:
    """Connect the registered functions to `plug` in the block; transformers' own masks become ours."""
    _active.append(plug)
    _ones.append(_Ones())
    try:
        with _ones[-1], _replace_mask_functions(lambda _: _mask):
            yield
    finally:
        _ones.pop()
        _active.pop()


def _sdpa(
    query: torch.Tensor, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **keywords: Any
) -> torch.Tensor | None:
    """torch's attention [B, H, S, Dv] by our function; None for a call without a four-dimensional mask."""
    if attn_mask is None or attn_mask.ndim != 4:
        return None
    module, scale = torch.nn.Module(), keywords.get("scale")
    return _attention(module, query, key, value, attn_mask, scale, dropout_p)[0].transpose(1, 2)


@contextmanager
def mask_functions() -> Iterator[list[MaskFunction]]:
    """Collect the mask functions of models with transformers' own attention in the block."""
    found: list[MaskFunction] = []

    def collecting(make: Callable[..., Any], *args: Any, mask_function: MaskFunction, **kwargs: Any) -> Any:
        found.append(mask_function)
        return make(*args, mask_function=mask_function, **kwargs)

    with _replace_mask_functions(lambda make: partial(collecting, make)):
        yield found


@contextmanager
def _replace_mask_functions(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the mask functions of eager and sdpa attention in the block."""
    masks: Any = AttentionMaskInterface._global_mapping
    own = {name: masks[name] for name in ("eager", "sdpa")}
    masks.update({name: replace(make) for name, make in own.items()})
    try:
        yield
    finally:
        masks.update(own)


def first_hidden(mask_function: MaskFunction, max_length: int) -> tuple[int, bool] | None:
    """The first query that does not see all keys before it, and whether it sees only its own; None without one."""
    zero = torch.zeros((), dtype=torch.long)

    def visible(query: int) -> int:
        keys = torch.arange(query + 1)
        return int(torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, query), keys)).sum())

    try:
        found = bisect.bisect_left(range(max_length), True, key=lambda query: visible(query) <= query)
        return None if found == max_length else (found, visible(found) == 1 < found)
    except Exception:  # noqa: BLE001 - functions may index tensors of the run
        return None


def active_plug() -> Plug:
    """The plug of the running model."""
    return _active[-1]


def register() -> None:
    """Register the attention and mask functions with transformers; idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def classify_mask(mask_function: MaskFunction, max_length: int) -> MaskRule | None:
    """The rule of an index mask function, evaluated for a few queries among `max_length` keys.

    None when it is neither causal nor a causal sliding window, or depends on more than positions: then the mask tensor
    is used. Raises UnsupportedModelError when a query sees later keys, i.e. cache rows that are not written yet.
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
                    "the model uses an attention mask in which a token attends to later ones (query "
                    f"{query} of {max_length}); only causal masks are supported"
                )
            regular = regular and torch.equal(row, (keys <= query) & (keys > query - window))
        everywhere = window < max_length or _is_causal_beyond(mask_function)
    if not regular:
        return None
    return MaskRule(None if window >= max_length else window, everywhere)


def _is_causal_beyond(mask_function: MaskFunction) -> bool:
    """Whether a token far beyond the cache attends to all tokens before it, without a window."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(FAR + 1)
    try:
        return bool(torch.as_tensor(mask_function(zero, zero, torch.full_like(keys, FAR), keys)).to(torch.bool).all())
    except Exception:  # noqa: BLE001 - a model's own function may not support this length
        return False


def additive_mask(
    mask_function: MaskFunction, positions: torch.Tensor, max_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """The eager mask [B, 1, S, N], 0 or lowest, of queries at `positions` [B, S] over N keys."""
    rows = torch.arange(positions.shape[0], dtype=positions.dtype)[:, None, None, None]
    keys = torch.arange(max_length, dtype=positions.dtype)[None, None, None, :]
    queries = positions[:, None, :, None]
    allowed = mask_function(rows, torch.zeros_like(rows), queries, keys)
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), torch.finfo(dtype).min, dtype=dtype))


def _mask(*args: Any, mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    """The registered mask function."""
    padding = kwargs.get("attention_mask")
    if padding is not None and not _ones[-1].knows(padding):
        raise UnsupportedModelError("the model builds a padding mask itself, which is not supported")
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
    """The registered attention function: checks that every argument is supported, then calls the active plug."""
    name = type(module).__name__
    unknown = sorted(k for k, v in keywords.items() if v is not None and k not in HARMLESS_KEYWORDS)
    if unknown:
        raise UnsupportedModelError(
            f"{name} passes {', '.join(unknown)} to its attention function, which is not supported"
        )
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 4:
        raise UnsupportedModelError(
            f"{name} attends without a mask; only masks of transformers' mask functions are supported"
        )
    if dropout or is_causal is False:
        raise UnsupportedModelError(
            f"{name} uses {'dropout' if dropout else 'attention that is not causal'} at inference, which "
            "is not supported"
        )
    if attention_mask.dtype == torch.bool:
        lowest = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype)
        attention_mask = torch.where(attention_mask, torch.zeros((), dtype=query.dtype), lowest)
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    request = AttentionRequest(query, key, value, attention_mask, scale, float(softcap or 0.0), s_aux, name)
    # contiguous as in eager attention: some models take a view of it
    return _active[-1].attend(request).contiguous(), None
