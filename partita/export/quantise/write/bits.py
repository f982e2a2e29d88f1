"""Packing of small integers into bytes."""

from __future__ import annotations

import torch


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [R, C] uint8 -> bytes [R, ceil(C * bits / 8)]; the first of two has the low bits."""
    if bits == 8:
        return integers.contiguous()
    if integers.shape[1] % 2:
        integers = torch.nn.functional.pad(integers, (0, 1))
    return integers[:, 0::2] | (integers[:, 1::2] << 4)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Bytes [R, C] uint8 -> the first `count` integers of each row."""
    if bits == 8:
        return packed[:, :count]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :count]
