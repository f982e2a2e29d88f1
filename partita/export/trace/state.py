"""The cache of each layer, found by running the model on fake tensors.

Fake tensors have no data, so the probe needs no memory at any model size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from partita.errors import UnsupportedModelError
from partita.export.trace.attention import AttentionRequest
from partita.export.trace.hooks import MaskFunction, MaskRule, additive_mask, classify_mask, connect_plug
from partita.export.trace.plug_cache import PlugCache, call

PROBE_TOKENS = 4

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
    odd = [state for state in first.written.values() if not state.shape or state.shape[0] != batch]
    if odd:
        raise UnsupportedModelError(
            f"layer {odd[0].layer} has a {odd[0].kind} state of shape {list(odd[0].shape)}, whose first "
            f"size is not the batch size ({batch}); this is not supported"
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
