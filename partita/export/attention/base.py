"""What a lowering of attention and cache is: a name, its cursor inputs, and a function that emits ONNX ops.

A lowering turns one attention call of the model, plus the past keys and values of that layer, into graph nodes that
write the new keys and values into the static cache and attend to all valid ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from partita.package import Role


@dataclass(frozen=True, slots=True)
class Cursor:
    """A graph input that tells where in the cache a step begins and ends."""

    name: str
    role: Role
    dtype: str
    per_row: bool
    """[B] when True, a scalar otherwise."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the model's attention function, as the lowering sees it.

    query [B, H, S, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]; past_key [B, Hkv, N, D], past_value [B, Hkv, N, Dv];
    positions [B, S] int32; cursors in the order of `Lowering.cursors`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    past_key: torch.Tensor
    past_value: torch.Tensor
    positions: torch.Tensor
    cursors: tuple[torch.Tensor, ...]
    scale: float
    softcap: float
    """0 when the model has none."""
    window: int | None
    """A query sees this many keys, itself included; None sees all."""


Emit = Callable[[AttentionCall], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
"""-> attention output [B, S, H, Dv], present key, present value."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way to write attention and cache in ONNX."""

    name: str
    opset: int
    """Default operator set."""
    min_opset: int
    domains: tuple[tuple[str, int], ...]
    """Contrib domains and their versions."""
    cursors: tuple[Cursor, ...]
    emit: Emit
    same_kv_width: bool
    """True when keys and values must have the same head size."""
    appends_in_batches: bool
    """True when several new tokens may follow past ones in every row of a batch, False when in a batch of one only."""
