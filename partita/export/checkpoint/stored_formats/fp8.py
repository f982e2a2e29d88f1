"""8-bit floats with a scale per block, row or tensor: FineGrainedFP8 of transformers, and others.

    X.weight            [..., N, K] float8_e4m3fn or float8_e5m2
    X.weight_scale_inv  [..., ceil(N / 128), ceil(K / 128)] float32 or bfloat16, float8_e8m0fnu, or uint8 exponents;
    X.weight_scale      or [N, 1], [N], [1], []

    W = weight * scale, computed in float32

(transformers, integrations/finegrained_fp8.py, Fp8Dequantize.) Stacks of experts are named without `.weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.export.checkpoint.stored_formats import FLOAT8, StoredTensors, StoredWeight
from partita.export.weights.origins import Reader, Region, TensorInfo

BLOCK = 128
ENDS = ("_scale_inv", "_scale")
"""Suffixes of the names of scales."""
OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale")
"""Scales of activations and the cache."""
EXPONENTS = frozenset({"U8", "torch.uint8"})
BIAS = 127
ACTIVATIONS = "activations that {} quantises to 8 bits are floats in the package; the weights are unchanged"


@dataclass(frozen=True)
class ScaledWeight(StoredWeight):
    """8-bit floats [..., N, K] with scales."""

    weight: TensorInfo
    factors: TensorInfo
    blocks: tuple[int, ...]
    """Elements per scale along each axis."""

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        return files.read(self.weight, region).float() * _expand(self.factors, self.blocks, region, files)


def _expand(scales: TensorInfo, blocks: Sequence[int], region: Region, files: Reader) -> torch.Tensor:
    """The scale of every element in `region`, float32, in a shape that broadcasts to it."""
    shape = (*scales.shape, *[1] * (len(blocks) - len(scales.shape)))
    some = [
        (0, 1) if size == 1 else (begin // block, -(-end // block))
        for size, block, (begin, end) in zip(shape, blocks, region, strict=True)
    ]
    found = files.read(scales, tuple(some[: len(scales.shape)])).reshape([end - begin for begin, end in some])
    found = (found.float() - BIAS).exp2() if scales.dtype in EXPONENTS else found.float()
    for axis, (block, (begin, end), (first, _)) in enumerate(zip(blocks, region, some, strict=True)):
        if shape[axis] > 1:
            found = found.index_select(axis, torch.arange(begin, end) // block - first)
    return found


def _blocks(
    sources: StoredTensors, weight: TensorInfo, scales: TensorInfo, expected: Sequence[int], *, declared: bool
) -> tuple[int, ...]:
    """Elements per scale along each axis; `declared`: `expected` is that of the settings. Raises CheckpointError."""
    shape, grid = weight.shape, (*scales.shape, *[1] * (len(weight.shape) - len(scales.shape)))
    padded = (*[1] * (len(shape) - len(expected)), *expected[-len(shape) :])
    found: list[int] = []
    for size, count, block in zip(shape, grid, padded, strict=False):
        if count < 1 or (len(scales.shape) == 1 and count not in (1, size)):
            break
        in_blocks = count == -(-size // block)
        if declared and max(grid) > 1 and not in_blocks:
            break
        if count == 1:
            found.append(max(1, size))
        elif in_blocks or size % count == 0:
            found.append(block if in_blocks else size // count)
    if not len(found) == len(shape) == len(grid):
        detail = f" in blocks of {' x '.join(map(str, expected))}"
        raise sources.tensor_error(
            scales.name, f"is {list(scales.shape)}, which does not match {weight.name} {list(shape)}{detail}"
        )
    return tuple(found)


def scaled_weight(
    sources: StoredTensors,
    weight: TensorInfo,
    scales: TensorInfo,
    expected: Sequence[int],
    name: str | None = None,
    *,
    declared: bool = False,
) -> ScaledWeight:
    """The weight of 8-bit floats and scales. `name`: if not the tensor's. Raises CheckpointError."""
    dtype = scales.dtype if scales.dtype in ("float16", "bfloat16", "float32") else "bfloat16"
    blocks = _blocks(sources, weight, scales, expected, declared=declared)
    return ScaledWeight(name or weight.name, weight.shape, (weight, scales), dtype, weight, scales, blocks)


def note_activations(sources: StoredTensors, *, declared: bool) -> None:
    """Mark the scales of activations as used, and add a note where there are any, or the settings have them."""
    found = [stem + end for end in OF_ACTIVATIONS for stem in sources.stems(end)]
    sources.weight_tensors.update(found)
    if found or declared:
        sources.notes.append(ACTIVATIONS.format(sources.method))


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of a checkpoint of 8-bit floats."""
    expected = sources.settings.get("weight_block_size") or (BLOCK, BLOCK)
    if not isinstance(expected, list | tuple) or not all(isinstance(n, int) and n > 0 for n in expected):
        raise sources.unsupported_error(
            f"with blocks of {str(expected)[:40]!r}", "correct weight_block_size in config.json"
        )
    weights: list[StoredWeight] = []
    declared = sources.settings.get("weight_block_size") is not None
    for name in sources.stems("", FLOAT8):
        if any(name.endswith(end) for end in (*ENDS, *OF_ACTIVATIONS)):
            continue
        own = next((name + end for end in ENDS if name + end in sources.tensors), name + ENDS[0])
        weights.append(scaled_weight(sources, sources.take(name), sources.take(own), expected, declared=declared))
    note_activations(sources, declared=sources.settings.get("activation_scheme") == "dynamic")
    return weights
