"""Bounds of cached keys over all positions, from keys at the first positions.

Cached keys are rotated: a channel pair (a, b) at position p is (a cos pθ - b sin pθ, a sin pθ + b cos pθ). For a small
θ, thousands of positions pass before a small channel gets the size of its large partner. The bound is computed from θ
instead of running a text of that length.

Source: Su et al., RoFormer, arXiv:2104.09864; ONNX Runtime, docs/ContribOperators.md, RotaryEmbedding and
GroupQueryAttention (do_rotary), for the pairs of channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

KEY, COS, SIN = 1, 7, 8
"""Input indices of GroupQueryAttention."""
LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operators allowed between a RotaryEmbedding and the attention that reads its keys."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of an attention's keys."""

    interleaved: bool
    """Pairs are neighbours; otherwise the first half of the rotated channels pairs with the second."""
    angles: npt.NDArray[np.float64]
    """Angle of each pair per position, in radians."""

    @property
    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Channels of a head that form pairs."""
        count = len(self.angles)
        first = 2 * np.arange(count) if self.interleaved else np.arange(count)
        return first, first + (1 if self.interleaved else count)


def rotation_of(attention: ir.Node) -> Rotation | None:
    """The rotation of the keys that a GroupQueryAttention caches; None without one, or with computed tables."""
    if attention.attributes.get_int("do_rotary", 0):
        return _rotation(attention, attention.inputs[COS], attention.inputs[SIN], "rotary_interleaved")
    key = attention.inputs[KEY]
    node = None if key is None else key.producer()
    while node is not None and node.op_type in LAYOUT and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or (node.domain, node.op_type) != ("com.microsoft", "RotaryEmbedding"):
        return None
    return _rotation(node, node.inputs[2], node.inputs[3], "interleaved")


def _rotation(node: ir.Node, cos: ir.Value | None, sin: ir.Value | None, interleaved: str) -> Rotation | None:
    values = [value.const_value for value in (cos, sin) if value is not None and value.const_value is not None]
    tables = [value.numpy() for value in values]
    if len(tables) != 2 or any(table.ndim != 2 or len(table) < 2 for table in tables):
        return None
    step = [table[1].astype(np.float64) for table in tables]
    return Rotation(bool(node.attributes.get_int(interleaved, 0)), np.arctan2(step[1], step[0]))


def largest_at_any(keys: Floats, rotation: Rotation, length: int) -> Floats:
    """The largest absolute value of each channel for a token at any of `length` positions, [KV heads, head size].

    `keys`: [rows, KV heads, tokens, head size], rotated, each token at the position of its index. Channels without
    rotation keep their largest value.
    """
    found: Floats = np.abs(keys).max(axis=(0, 2))
    one, other = rotation.pairs
    a, b = keys[..., one].astype(np.float64), keys[..., other].astype(np.float64)
    at = np.arange(keys.shape[2], dtype=np.float64)[:, None] * rotation.angles
    begin = np.arctan2(b, a) - at
    end = begin + (length - 1) * rotation.angles
    low, high = np.minimum(begin, end), np.maximum(begin, end)
    size = np.hypot(a, b)
    for channels, shift in ((one, 0.0), (other, np.pi / 2)):  # sin x = cos(x - π/2)
        first, last = low - shift, high - shift
        crest = np.floor(last / np.pi) >= np.ceil(first / np.pi)  # |cos| is 1 at every multiple of π
        most = np.where(crest, 1.0, np.maximum(np.abs(np.cos(first)), np.abs(np.cos(last))))
        found[:, channels] = np.maximum(found[:, channels], (size * most).max(axis=(0, 2)))
    return found
