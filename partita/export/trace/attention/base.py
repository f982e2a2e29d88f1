"""What a lowering of attention and cache is: a name, its cursor inputs, and a function that emits ONNX ops.

A lowering turns one attention call of the model, plus the past keys and values of that layer, into graph nodes that
write the new keys and values into the static cache and attend to all valid ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from partita.package.contract import Role


Fused = Literal["contrib", "standard", "none"]
"""Operators that stand for several: ONNX Runtime's own, those of ONNX's operator sets 23 and later, or none."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A graph input that tells where in the cache a step begins and ends."""

    name: str
    role: Role
    dtype: str
    per_row: bool
    """[B] when True, a scalar otherwise."""
    per_key: bool = False
    """[B, T]: an entry for each row of a cache that grows, those of this step included."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Attention over all rows of a cache.

    query [B, H, S, D], keys [B, Hkv, N, D], values [B, Hkv, N, Dv]; positions [B, S] int32; cursors in the order of
    `Lowering.cursors`.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    cursors: tuple[torch.Tensor, ...]
    scale: float
    softcap: float
    """0 when the model has none."""
    window: int | None
    """A query sees this many keys, itself included; None sees all before it."""
    mask: torch.Tensor | None
    """[B or 1, H or 1, S, N], added to the scores in place of the causal rule and the window; None: the rule holds."""
    sink: torch.Tensor | None
    """[H]: score of a key that is always seen and has no value; None when the model has none."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call that reads what its layer has just cached: write and attend may be one operator.

    key [B, Hkv, S, D], value [B, Hkv, S, Dv] are the new ones; past_key [B, Hkv, N, D'], past_value [B, Hkv, N, Dv'],
    which may be wider than what is written into them; the rest as in `Reading`.
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
    window: int | None
    mask: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    rolls: bool = False
    """N is the window here: the operator drops what is older."""

    def reading(self, keys: torch.Tensor, values: torch.Tensor) -> Reading:
        """The attention half of the call, over the cache with the new keys and values in it."""
        return Reading(
            self.query,
            keys,
            values,
            self.positions,
            self.cursors,
            self.scale,
            self.softcap,
            self.window,
            self.mask,
            self.sink,
        )


Emit = Callable[[AttentionCall], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
"""-> attention output [B, S, H, Dv], present key, present value."""
Write = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "tuple[torch.Tensor, ...]"], "torch.Tensor"]
"""past [B, Hkv, N, D], new [B, Hkv, S, D], positions, cursors -> present."""
Attend = Callable[[Reading], "torch.Tensor"]
"""-> attention output [B, S, H, Dv]."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way to write attention and cache in ONNX."""

    name: str
    rank: int
    """What it is worth where a provider takes all of it, the best first: fewest nodes, most in place."""
    merit: str
    """What is good about it, in a few words."""
    opset: int
    """Default operator set."""
    min_opset: int
    domains: tuple[tuple[str, int], ...]
    """Contrib domains and their versions."""
    cursors: tuple[Cursor, ...]
    emit: Emit
    write: Write
    """For a layer whose keys are read by something else than its own attention call."""
    attend: Attend
    takes_mask: bool
    """True when `emit` can do with a mask tensor."""
    same_kv_width: bool
    """True when keys and values must have the same head size: the narrower ones are padded with zeros."""
    fused: Fused
    """Operators that graph passes may write in the place of several others, beside this lowering."""
    appends_in_batches: bool
    """True when several new tokens may follow past ones in every row of a batch, False when in a batch of one only."""
    rolls: bool = False
    """Its operator can keep a cache of a window alone."""
    grows: bool = False
    """Past has as many rows as there are tokens so far, present those of the step, too; a cursor is T long. It is taken
    only where it is asked for. False: both have N rows.
    """
