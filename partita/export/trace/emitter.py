"""The plug of a trace: it turns the model's cache and attention calls into the operators of a lowering.

The model gets keys and values of all cache rows. Where its attention call reads exactly these, the lowering may write
and attend in one operator, and the separate write is removed as dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from partita.errors import UnsupportedModelError
from partita.export.trace import DOMAIN, pad_last_axis
from partita.export.trace.attention import AttentionCall, AttentionRequest, Lowering, Reading
from partita.export.trace.hooks import MaskFunction, MaskRule, additive_mask
from partita.export.trace.state import ModelStates

CACHE_LENGTH = "CacheLength"
"""Placeholder operator for the number of cached tokens, which a batch does not have (`tracing._check_placeholders`)."""
ROLLED = "RolledCache"
"""Placeholder operator for the rows of a window cache, which only the layer's own attention may read
(likewise)."""

Key = tuple[str, int, int]
"""Kind of a state, layer, index."""


@dataclass(slots=True)
class Written:
    """Keys and values of one layer in one step."""

    key: torch.Tensor
    value: torch.Tensor
    keys: torch.Tensor
    """Keys returned to the model."""
    values: torch.Tensor
    present: tuple[torch.Tensor, torch.Tensor]
    fused: bool = False
    rolls: bool = False


@dataclass(slots=True)
class Emitter:
    """The plug of one trace."""

    probed: ModelStates
    lowering: Lowering
    max_length: int
    """Rows of the cache; a symbolic size for a growing cache."""
    count: int
    positions: torch.Tensor
    cursors: tuple[torch.Tensor, ...]
    past: Mapping[Key, torch.Tensor]
    rolling: frozenset[int] = frozenset()
    """Layers with a window cache."""
    written: dict[int, Written] = field(default_factory=dict)
    states: dict[Key, torch.Tensor] = field(default_factory=dict)
    last_state: torch.Tensor | None = None
    _masks: dict[int, tuple[torch.Tensor, int, MaskRule | None]] = field(default_factory=dict)
    """By identity, with the tensor's version: valid while the object is alive and unmodified."""

    def mask(self, mask_function: MaskFunction, dtype: torch.dtype) -> torch.Tensor:
        """The mask as a tensor. Its rule is known from the probe."""
        index = len(self._masks)
        rule = self.probed.masks[index] if index < len(self.probed.masks) else None
        mask = additive_mask(mask_function, self.positions, self.max_length, dtype)
        if self.lowering.grows:  # for models with their own attention code, where no other mask hides padding
            padding = (self.cursors[0] == 0)[:, None, None, :]
            mask = mask.masked_fill(padding, torch.finfo(dtype).min)
        self._masks[id(mask)] = mask, mask._version, rule
        return mask

    def rule_of(self, tensor: Any) -> MaskRule | None:
        """The rule of a mask that was not modified; None for other values."""
        _, version, rule = self._masks.get(id(tensor), (None, 0, None))
        return rule if rule is not None and version == tensor._version else None

    @property
    def mask_count(self) -> int:
        """Number of masks built."""
        return len(self._masks)

    def check(self) -> None:
        """Raise UnsupportedModelError for another number of masks than in the probe: rules are matched by order."""
        if len(self._masks) != len(self.probed.masks):
            raise UnsupportedModelError(
                f"the model built {len(self.probed.masks)} masks when probed and {len(self._masks)} when "
                "traced, so they cannot be matched"
            )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values into the cache, and return all rows."""
        past = self.past["key", layer, 0], self.past["value", layer, 0]
        if layer in self.rolling:
            keys, values = (self._rolled(new) for new in (key, value))
            self.written[layer] = Written(key, value, keys, values, (keys, values), rolls=True)
            return keys, values
        present_key, present_value = (
            self.lowering.write(old, pad_last_axis(new, old.shape[-1]), self.positions, self.cursors)
            for old, new in zip(past, (key, value), strict=True)
        )
        keys, values = _narrowed(present_key, key.shape[-1]), _narrowed(present_value, value.shape[-1])
        self.written[layer] = Written(key, value, keys, values, (present_key, present_value))
        return keys, values

    def _rolled(self, new: torch.Tensor) -> torch.Tensor:
        """A placeholder for all rows of a window cache."""
        shape = (*new.shape[:2], self.max_length, new.shape[3])
        operator = f"{DOMAIN}::{ROLLED}"
        return torch.onnx.ops.symbolic(operator, (new,), {}, dtype=new.dtype, shape=shape, version=1)

    def attend(self, request: AttentionRequest) -> torch.Tensor:
        """The attention output."""
        assert request.mask is not None
        rule = self.rule_of(request.mask)
        if self.lowering.grows and rule is not None and not rule.any_length:
            rule = None  # the tensor limits the window, which is longer than N
        whole = statically_known_true(request.query.shape[2] == self.positions.shape[1])
        mask = request.mask if rule is None or not whole else None
        window = rule.window if rule is not None else None
        keys, values = request.keys, request.values
        layer = next((n for n, w in self.written.items() if w.keys is keys and w.values is values), None)
        of_model = request.query, keys, values, mask, request.scale, request.softcap, request.sink, request.module
        reading = Reading(*of_model, self.positions, self.cursors, window)
        if layer is None or self.written[layer].fused or (mask is not None and not self.lowering.takes_mask):
            if layer is not None:
                # Keys of another layer: read the cache that its attention wrote.
                present = self.written[layer].present
                keys, values = _narrowed(present[0], keys.shape[-1]), _narrowed(present[1], values.shape[-1])
                reading = replace(reading, keys=keys, values=values)
            if reading.keys.shape[2] != self.max_length:
                raise UnsupportedModelError(
                    f"{request.module} attends to keys that it has not cached, which is not supported"
                )
            return self.lowering.attend(reading)
        written = self.written[layer]
        new, past = replace(reading, keys=written.key, values=written.value), self.past
        call = AttentionCall(new, past["key", layer, 0], past["value", layer, 0], written.rolls)
        output, *present_pair = self.lowering.emit(call)
        written.present, written.fused = (present_pair[0], present_pair[1]), True
        return output

    def length(self) -> Any:
        """The number of cached tokens: the first position as a scalar tensor, or a number."""
        if not self.probed.length_as_tensor:
            return self.max_length - self.positions.shape[1] if self.lowering.grows else 0
        if self.lowering.grows:  # the same for all sequences: padding has positions, too
            return self.positions[0, 0].to(torch.int64)
        if self.positions.shape[0] > 1:
            operator = f"{DOMAIN}::{CACHE_LENGTH}"
            return torch.onnx.ops.symbolic(operator, (self.positions,), {}, dtype=torch.int64, shape=(), version=1)
        inputs, dtype = (self.positions, torch.zeros(2, dtype=torch.int64)), self.positions.dtype
        first = torch.onnx.ops.symbolic("onnx::GatherND", inputs, {}, dtype=dtype, shape=(), version=13)
        return first.to(torch.int64)

    def read_state(self, kind: str, layer: int, index: int) -> torch.Tensor | None:
        """A copy that the model may modify; its final content is the present state."""
        key = kind, layer, index
        if key not in self.states and key in self.past:
            self.states[key] = self.past[key].clone()
        state = self.states.get(key)
        if kind == "recurrent":
            self.last_state = state
        return state

    def write_state(self, kind: str, layer: int, index: int, state: torch.Tensor) -> None:
        """Replace the value of a state."""
        self.states[kind, layer, index] = state
        if kind == "recurrent":
            self.last_state = None

    def present(self, key: Key) -> torch.Tensor:
        """The value of a state after the step. Raises UnsupportedModelError when the model did not write it."""
        kind, layer, _ = key
        if kind in ("key", "value"):
            if layer not in self.written:
                raise UnsupportedModelError(f"layer {layer} cached keys when probed, but not when traced")
            return self.written[layer].present[kind == "value"]
        if key not in self.states:
            raise UnsupportedModelError(f"layer {layer} kept a {kind} state when probed, but not when traced")
        return self.states[key].to(self.past[key].dtype)


def _narrowed(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` entries of the last axis."""
    return tensor if tensor.shape[-1] == width else tensor[..., :width]
