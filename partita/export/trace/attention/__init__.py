"""Lowerings of attention and cache, one file each. The file name is the value of ``--attention``.

A lowering emits nodes for one attention call: they write the new keys and values into the static cache and attend to
all valid ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from partita.errors import UsageError

if TYPE_CHECKING:
    import torch

    from partita.package.contract import Role


__all__ = ["GROWING", "Lowering", "lowering", "NAMES", "by_preference"]


GROWING: Final = "growing"
"""The lowering of `--cache growing`, not available through `--attention`."""


NAMES: Final = ("gqa", "onnx24", "primitives")
"""The lowerings with a static cache in order of preference: fewest nodes, most in place, first."""


def by_preference() -> tuple[Lowering, ...]:
    """All lowerings with a static cache in order of preference, for `auto`."""
    return tuple(lowering(name) for name in NAMES)


def lowering(name: str) -> Lowering:
    """The lowering with this name. Raises UsageError, which lists the names, where there is none."""
    if name not in (*NAMES, GROWING):
        raise UsageError(f"`attention={name}`: unknown lowering; choose one of auto, {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{'primitives' if name == GROWING else name}")
    found = module.GROWS if name == GROWING else module.LOWERING
    assert isinstance(found, Lowering)
    return found


Fused = Literal["contrib", "standard", "none"]
"""Fused operators: those of ONNX Runtime, those of ONNX's operator sets 23 and later, or none."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A graph input with the position of a step in the cache."""

    name: str
    role: Role
    dtype: str
    per_row: bool
    """[B] when True, a scalar otherwise."""
    per_key: bool = False
    """[B, T]: one entry per row of a growing cache, including those of this step."""


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """One attention call of a model, with every keyword accounted for.

    query [B, H, S, D]; keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] over all rows of the cache.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    """[B or 1, H or 1, S, N], added to the scores. In a `Reading` None: causal, within the window."""
    scale: float
    softcap: float
    """0 without a softcap."""
    sink: torch.Tensor | None
    """[H]: score of an always visible key without a value; None without a sink."""
    module: str
    """Class of the module that attends, for messages."""


@dataclass(frozen=True, slots=True)
class Reading(AttentionRequest):
    """Attention over all rows of a cache: positions [B, S] int32; cursors in the order of `Lowering.cursors`."""

    positions: torch.Tensor
    cursors: tuple[torch.Tensor, ...]
    window: int | None
    """Number of keys that a query sees, including its own; None: all before it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call that reads the keys its layer has just cached, so that one operator may write and attend.

    past_key [B, Hkv, N, D'], past_value [B, Hkv, N, Dv'] may have larger head sizes than the new keys and values.
    """

    reading: Reading
    """The attention, with the new keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] only."""
    past_key: torch.Tensor
    past_value: torch.Tensor
    rolls: bool = False
    """N is the window: the operator drops older rows."""


Emit = Callable[[AttentionCall], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
"""-> attention output [B, S, H, Dv], present key, present value."""
Write = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "tuple[torch.Tensor, ...]"], "torch.Tensor"]
"""past [B, Hkv, N, D], new [B, Hkv, S, D], positions, cursors -> present."""
Attend = Callable[[Reading], "torch.Tensor"]
"""-> attention output [B, S, H, Dv]."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """A way to write attention and cache in ONNX."""

    name: str
    opset: int
    """Default operator set."""
    min_opset: int
    cursors: tuple[Cursor, ...]
    write: Write
    attend: Attend
    fused: Fused
    """Operators that graph passes may fuse nodes into, with this lowering."""
    domains: tuple[tuple[str, int], ...] = ()
    """Contrib domains and their versions."""
    takes_mask: bool = True
    """`emit` supports a mask tensor."""
    same_kv_width: bool = False
    """Keys and values must have the same head size: the smaller ones are padded with zeros."""
    appends_in_batches: bool = True
    """Several new tokens may follow past ones in every sequence of a batch; False: only in a batch of one."""
    rolls: bool = False
    """Its operator supports a window cache."""
    grows: bool = False
    """Past states have one row per earlier token, present states one per token; a cursor has length T. Used on request
    only. False: both have N rows."""
    fused_call: Emit | None = None
    """Writes and attends in one operator; None: with `write` and `attend`, as for a layer whose keys others read."""

    def emit(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Emit the nodes of a call. Returns output [B, S, H, Dv], present key, present value."""
        if self.fused_call is not None:
            return self.fused_call(call)
        new = call.reading
        key = self.write(call.past_key, new.keys, new.positions, new.cursors)
        value = self.write(call.past_value, new.values, new.positions, new.cursors)
        return self.attend(replace(new, keys=key, values=value)), key, value
