"""The cache of each layer: a transformers cache that forwards every tensor to the plug, and the probe of its states.

The cache behaves like transformers' static cache: keys and values of all N rows are returned, and the masks select the
valid ones. Convolution and recurrent states are those of a layer with earlier tokens; a state of zeros equals no state.
The probe runs the model once on fake tensors, which need no memory at any model size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.cache_utils import Cache

from partita.errors import UnsupportedModelError
from partita.export.trace.attention import AttentionRequest
from partita.export.trace.hooks import MaskFunction, MaskRule, Plug, additive_mask, classify_mask, connect_plug

PROBE_TOKENS = 4


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

    get_query_offset = get_seq_length
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


Kind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class LayerState:
    """Keys and values of one layer."""

    layer: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    """Sliding window in tokens; None without one, for a cache not longer than the window, or where only the mask tensor
    defines visibility."""
    fused: bool = False
    """The layer's own attention call reads the keys just cached: one operator can write and attend."""
    shared: bool = False
    """Another attention call reads it, too."""

    @property
    def rolls(self) -> bool:
        """Whether it supports a window cache: it has a window, and only its own attention reads it."""
        return self.window is not None and self.fused and not self.shared


@dataclass(frozen=True, slots=True)
class ExtraState:
    """A convolution or recurrent state of one layer."""

    layer: int
    kind: Kind
    index: int
    """0, except for layers with several states of a kind."""
    shape: tuple[int, ...]
    """The first size is the batch."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The states of a model, and its masks in order."""

    layers: tuple[LayerState, ...]
    extras: tuple[ExtraState, ...]
    masks: tuple[MaskRule | None, ...]
    length_as_tensor: bool
    """The model reads the number of cached tokens as a tensor; otherwise it needs a number, and gets 0."""
    outside_cache: tuple[str, ...] = ()
    """Tensors that modules of the model keep between steps, outside of transformers' cache."""
    needs_ones_mask: bool = False
    """The model counts keys by its padding mask (ALiBi of falcon): it gets a mask of ones over all N."""

    @property
    def recurs(self) -> bool:
        """Whether a state depends on every input token, so that padding would corrupt it."""
        return bool(self.extras)


@dataclass(slots=True)
class Recorder:
    """A plug that records."""

    batch: int
    positions: torch.Tensor
    max_length: int
    count: int
    length_as_tensor: bool
    extras: dict[tuple[str, int, int], ExtraState] = field(default_factory=dict)
    """Known from an earlier run, in which case the model gets states of zeros."""
    layer_states: dict[int, LayerState] = field(default_factory=dict)
    rules: list[MaskRule | None] = field(default_factory=list)
    written: dict[tuple[str, int, int], ExtraState] = field(default_factory=dict)
    last_state: torch.Tensor | None = None
    _masks: dict[int, tuple[torch.Tensor, MaskRule | None]] = field(default_factory=dict)
    _refused: dict[int, UnsupportedModelError] = field(default_factory=dict)
    _caches: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _states: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """Tensors are kept alive, so that their identities stay valid."""

    def mask(self, mask_function: MaskFunction, dtype: torch.dtype) -> torch.Tensor:
        """Record the rule; returns a mask of the right shape."""
        mask = additive_mask(mask_function, self.positions, self.max_length, dtype)
        rule = None
        try:
            rule = classify_mask(mask_function, self.max_length)
        except UnsupportedModelError as error:
            # The decoder of an encoder-decoder creates this mask for a missing encoder.
            self._refused[id(mask)] = error
        self.rules.append(rule)
        self._masks[id(mask)] = mask, rule
        return mask

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Record heads and widths."""
        if layer in self.layer_states:
            raise UnsupportedModelError(f"layer {layer} caches keys twice in one step, which is not supported")
        self.layer_states[layer] = LayerState(layer, key.shape[1], key.shape[-1], value.shape[-1])
        keys = key.new_zeros(key.shape[0], key.shape[1], self.max_length, key.shape[3])
        values = value.new_zeros(value.shape[0], value.shape[1], self.max_length, value.shape[3])
        self._caches[id(keys)] = keys, layer
        return keys, values

    def attend(self, request: AttentionRequest) -> torch.Tensor:
        """Record the window; returns an output of the right shape."""
        _, layer = self._caches.get(id(request.keys), (None, None))
        _, rule = self._masks.get(id(request.mask), (None, None))
        if id(request.mask) in self._refused:
            raise self._refused[id(request.mask)]
        if layer is not None and not self.layer_states[layer].fused:
            window = rule.window if rule is not None else None
            self.layer_states[layer] = replace(self.layer_states[layer], window=window, fused=True)
        elif layer is not None:
            self.layer_states[layer] = replace(self.layer_states[layer], shared=True)
        batch, heads, length, _ = request.query.shape
        return request.query.new_zeros(batch, length, heads, request.values.shape[-1])

    def length(self) -> Any:
        """Tokens cached before."""
        return self.positions[0, 0].to(torch.int64) if self.length_as_tensor else 0

    def read_state(self, kind: str, layer: int, index: int) -> torch.Tensor | None:
        """A state of zeros, once its shape is known."""
        key = kind, layer, index
        if key not in self._states and (known := self.extras.get(key)) is not None:
            self._states[key] = torch.zeros(known.shape, dtype=known.dtype)
        state = self._states.get(key)
        if kind == "recurrent":
            self.last_state = state
        return state

    def write_state(self, kind: str, layer: int, index: int, state: torch.Tensor) -> None:
        """Record shape and dtype."""
        assert kind in ("conv", "recurrent")
        shape = tuple(int(size) for size in state.shape)
        if kind == "recurrent":
            self.last_state = None
        if state.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(f"layer {layer} keeps a {kind} state of {state.dtype}, which is not supported")
        self.written[kind, layer, index] = ExtraState(layer, kind, index, shape, state.dtype)  # type: ignore[arg-type]


def probe(model: torch.nn.Module, fake: FakeTensorMode, batch: int, max_length: int) -> ModelStates:
    """Run `model` under `fake`; its states. Raises UnsupportedModelError for states outside of the cache."""
    before = set(_own_tensors(model))
    first, ones = _first_run(model, fake, batch, max_length)
    if first.written:
        # Again with states, as in every later step.
        later = _run(model, fake, batch, max_length, first.written, length_as_tensor=first.length_as_tensor, ones=ones)
        changed = [key for key in first.written | later.written if first.written.get(key) != later.written.get(key)]
        if changed:
            kind, layer, _ = changed[0]
            raise UnsupportedModelError(
                f"layer {layer} keeps a different {kind} state in later steps than in the first, which is not supported"
            )
    if not first.layer_states and not first.written:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' cache, so it cannot be traced with a static cache"
        )
    layers = tuple(first.layer_states[layer] for layer in sorted(first.layer_states))
    extras = tuple(first.written[key] for key in sorted(first.written, key=lambda k: (k[1], k[0], k[2])))
    outside = tuple(name for name in _own_tensors(model) if name not in before)
    return ModelStates(layers, extras, tuple(first.rules), first.length_as_tensor, outside, ones)


def _first_run(model: torch.nn.Module, fake: FakeTensorMode, batch: int, max_length: int) -> tuple[Recorder, bool]:
    """The first way of calling the model that works, and whether it needs a padding mask of ones."""
    failed: Exception | None = None
    for ones in (False, True):
        try:
            try:
                return _run(model, fake, batch, max_length, {}, length_as_tensor=True, ones=ones), ones
            except DataDependentOutputException:
                return _run(model, fake, batch, max_length, {}, length_as_tensor=False, ones=ones), ones
        except UnsupportedModelError:
            if failed is not None:
                break
            raise
        except Exception as error:  # noqa: BLE001 - the model's own code may fail in any way
            failed = failed or error
    assert failed is not None
    raise failed


def _own_tensors(model: torch.nn.Module) -> list[str]:
    """Tensor attributes of the modules other than parameters and buffers."""
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def _run(
    model: torch.nn.Module,
    fake: FakeTensorMode,
    batch: int,
    max_length: int,
    extras: dict[tuple[str, int, int], ExtraState],
    *,
    length_as_tensor: bool,
    ones: bool,
) -> Recorder:
    """Run a few tokens; returns the record."""
    with fake, torch.no_grad():
        ids = torch.zeros(batch, min(PROBE_TOKENS, max_length), dtype=torch.long)
        positions = torch.zeros(ids.shape, dtype=torch.int32)
        recorder = Recorder(batch, positions, max_length, layer_count(model), length_as_tensor, extras)
        with connect_plug(recorder):
            rows = torch.zeros(1, dtype=torch.long)
            call(model, ids, positions, PlugCache(recorder), rows, max_length if ones else None)
    return recorder


def text_config(model: torch.nn.Module) -> Any:
    """The config of the decoder, one of several in a multimodal model."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def layer_count(model: torch.nn.Module) -> int:
    """Number of layers of the cache of `model`."""
    return int(text_config(model).num_hidden_layers)
