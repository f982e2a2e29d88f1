"""compressed-tensors, as llm-compressor saves it: packed integers, 8-bit integers, or 8-bit floats.

    pack-quantized   X.weight_packed [N, ceil(K * bits / 32)] int32, lowest bits first, stored plus 2^(bits-1)
                     X.weight_zero_point [ceil(N * bits / 32), G] int32, packed along N in the same way, or absent
                     X.weight_shape [2] int64; X.weight_g_idx [K] int32 with act-order
    int-quantized    X.weight [N, K] int8, X.weight_zero_point [N, G] int8 or absent
    float-quantized  X.weight [N, K] float8_e4m3fn
    all              X.weight_scale [N, G], [N, 1], [1], or blocks of both axes for float weights

    W[n, k] = scale[n, g] * (q[n, k] - z[n, g])

(compressed-tensors, compressors/pack_quantized.py and quantization/lifecycle/forward.py.) The tensors show the format
of each weight; a checkpoint may mix them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partita.export.checkpoint.stored_formats import (
    FLOAT,
    FLOAT8,
    INT32,
    INTEGER,
    SIGNED_BYTE,
    WORD,
    GroupedWeight,
    Integers,
    StoredTensors,
    StoredWeight,
    is_packed,
)
from partita.export.checkpoint.stored_formats.fp8 import BLOCK, note_activations, scaled_weight
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.weights.origins import TensorInfo

BITS = (2, 3, 4, 8)
Stored = tuple[str, tuple[int, ...], int, TensorInfo, TensorInfo]
"""A module, the shape and bits of its weight, its integers and its scales."""


def read(sources: StoredTensors) -> list[StoredWeight]:
    """The weights of a compressed-tensors checkpoint."""
    sparse, transform = sources.settings.get("sparsity_config"), sources.settings.get("transform_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") not in ("dense", None):
        raise sources.unsupported_error(f"with sparsity ({sparse['format']})", "save it without sparsity compression")
    if transform:
        raise sources.unsupported_error("with transforms of activations", "quantise the model without transform_config")
    groups = _groups_with(sources.settings, "weights")
    structures = [shape for each in groups if (shape := _block_structure(each)) is not None]
    stored = [_packed(sources, stem, groups) for stem in sources.stems(".weight_packed")]
    found: list[StoredWeight] = []
    for stem in sources.stems(".weight", f"{SIGNED_BYTE}|{FLOAT8}"):
        weight, scales = sources.take(f"{stem}.weight"), sources.take(f"{stem}.weight_scale", FLOAT)
        if weight.dtype in ("I8", "torch.int8"):
            widths = {each.get("num_bits") for each in groups}
            bits = next((bits for bits in BITS if widths == {bits}), 8)
            stored.append((stem, weight.shape, bits, weight, scales))
        else:
            blocks, declared = next(iter(structures), (BLOCK, BLOCK)), 0 < len(structures) == len(groups)
            found.append(scaled_weight(sources, weight, scales, blocks, declared=declared))
            sources.optional(f"{stem}.weight_zero_point")
    has_zeros = bool(groups) and all(each.get("symmetric") is False for each in groups)
    has_order = bool(groups) and all(each.get("actorder") in (True, "group", "dynamic") for each in groups)
    for stem, sizes, bits, integers, scales in stored:
        zeros = (sources.take if has_zeros else sources.optional)(f"{stem}.weight_zero_point")
        g_idx = (sources.take if has_order else sources.optional)(f"{stem}.weight_g_idx", INT32)
        found.append(of_integers(sources, f"{stem}.weight", sizes, bits, integers, scales, zeros, g_idx))
    for each in found:
        _check_groups(sources, each, groups)
    if groups and all(each.get("symmetric") is True for each in groups):
        sources.symmetric |= {each.name: "symmetric" for each in found}
    note_activations(sources, declared=bool(_groups_with(sources.settings, "input_activations")))
    return found


def _check_groups(sources: StoredTensors, weight: StoredWeight, groups: list[Mapping[str, Any]]) -> None:
    """Raise CheckpointError where a weight has another number of scales per row than all settings."""
    scales, width = sources.tensors[f"{weight.name}_scale"], weight.shape[-1]
    sizes = [each.get("group_size") for each in groups]
    counts = {-(-width // size) if isinstance(size, int) and size > 0 else 1 for size in sizes}
    found = scales.shape[1] if len(scales.shape) > 1 else 1
    if groups and found not in counts and not any(each.get("strategy") == "block" for each in groups):
        raise sources.tensor_error(
            scales.name, f"is {list(scales.shape)}, which does not match the group_size of the settings"
        )


def _packed(sources: StoredTensors, stem: str, groups: list[Mapping[str, Any]]) -> Stored:
    """A weight of packed integers. Its shape is stored, because the last word of a row may be padded."""
    packed, scales = sources.take(f"{stem}.weight_packed"), sources.take(f"{stem}.weight_scale")
    stored = sources.take(f"{stem}.weight_shape", INTEGER)
    if not is_packed(packed):
        raise sources.unsupported_error(
            f"in 4-bit floats (tensor {packed.name} is {packed.dtype})", "only packed integers and fp8 are supported"
        )
    sources.check_shape(stored, (2,), by=packed)
    with OpenFiles() as files:
        rows, width = map(int, stored.read_all(files).tolist())
    declared = [each.get("num_bits") for each in groups]
    allowed = [bits for bits in BITS if bits in declared or not any(declared)]
    bits = next((bits for bits in allowed if packed.shape == (rows, -(-width * bits // WORD))), None)
    if bits is None or min(rows, width) < 1:
        raise sources.tensor_error(
            packed.name,
            f"is {list(packed.shape)}, which does not match {stored.name} {[rows, width]} as integers of "
            f"{' or '.join(map(str, allowed or declared))} bits",
        )
    return stem, (rows, width), bits, packed, scales


def of_integers(
    sources: StoredTensors,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    integers: TensorInfo,
    scales: TensorInfo,
    zeros: TensorInfo | None,
    g_idx: TensorInfo | None = None,
) -> StoredWeight:
    """A weight of signed integers, packed or not. Raises CheckpointError when the tensors do not match each other."""
    if len(shape) != 2:
        raise sources.tensor_error(integers.name, f"is {list(shape)}, not a matrix")
    rows, width = shape
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if groups < 1 or width % groups:
        groups = 1
    sources.check_shape(scales, (), (1,), (rows,), (1, groups), (rows, groups), by=integers)
    if zeros is not None and is_packed(zeros):
        sources.check_shape(zeros, (-(-rows * bits // WORD), groups), by=scales)
    elif zeros is not None:
        shared = [] if groups > 1 else [(), (1,), (1, 1)]
        sources.check_shape(zeros, (rows, groups), *shared, by=scales)
    if g_idx is not None:
        sources.check_shape(g_idx, (width,), by=integers)
    tensors = tuple(info for info in (integers, scales, zeros, g_idx) if info is not None)
    moved = {False: 1 << (bits - 1), True: 0}  # words have unsigned integers
    stored = Integers(integers, bits, offset=moved[is_packed(integers)])
    points = None if zeros is None else Integers(zeros, bits, across=True, offset=moved[is_packed(zeros)])
    group = width // groups
    return GroupedWeight(name, (rows, width), tensors, scales.dtype, bits, 1, group, stored, scales, points, g_idx)


def _groups_with(settings: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The settings `key` of all config groups."""
    groups = settings.get("config_groups")
    every = groups.values() if isinstance(groups, Mapping) else ()
    found = [group.get(key) for group in every if isinstance(group, Mapping)]
    return [each for each in found if isinstance(each, Mapping)]


def _block_structure(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block shape in the settings of weights; None without a valid one."""
    found = weights.get("block_structure")
    if isinstance(found, list) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found):
        return found[0], found[1]
    return None
