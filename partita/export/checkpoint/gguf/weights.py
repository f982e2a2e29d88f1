"""Maps tensors of a GGUF file to parameters of a transformers model: permuted rows of tensors, or a whole tensor.

transformers has a processor per architecture (`modeling_gguf_pytorch_utils`), which reverts the changes of llama.cpp's
converter: it permutes query and key rows, subtracts 1 from norms, stacks experts. The processor runs here on the square
roots of row numbers: only a permutation returns exactly these. Then the tensor is read row by row; otherwise it is
processed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, modeling_gguf_pytorch_utils

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint import auto_class
from partita.export.checkpoint.gguf import AFFINE, BlockType, Bytes, GgufTensor, Header, dequantised
from partita.export.checkpoint.stored_formats import AffineWeight, StoredFloats, StoredWeight
from partita.export.checkpoint.weight_files import few, first_line
from partita.export.weights import Quantised
from partita.export.weights.origins import Reader, Region

Index = npt.NDArray[np.int64]
"""For each row of a weight along the last axis, its index in the concatenated rows of the tensors."""


def mapped(tensor: GgufTensor) -> Bytes:
    """The memory-mapped bytes of a tensor [rows, bytes]."""
    shape = math.prod(tensor.shape[:-1]), tensor.shape[-1] // tensor.type.block * tensor.type.size_bytes
    return np.memmap(tensor.file, np.uint8, "r", offset=tensor.start, shape=shape)


def _columns(values: npt.NDArray[Any], region: Region, block: int) -> torch.Tensor:
    """The columns of `region` of rows that begin with its first block."""
    begin, end = region[-1]
    first = begin // block * block
    return torch.from_numpy(np.ascontiguousarray(values[:, begin - first : end - first]))


@dataclass(frozen=True, eq=False)
class RowWeight(StoredWeight):
    """Rows that the package gguf dequantises, each by the type of its tensor, e.g. of the halves of an expert."""

    stored_tensors: tuple[GgufTensor, ...]
    index: Index

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        begin, end = region[-1]
        found = torch.empty(math.prod(stop - start for start, stop in region[:-1]), end - begin)
        for here, raw, kind in self._stored(region):
            found[here] = _columns(dequantised(raw, kind.number), region, kind.block)
        return found.reshape([stop - start for start, stop in region])

    def _stored(self, region: Region) -> Iterator[tuple[torch.Tensor, Bytes, BlockType]]:
        """For each tensor with rows in `region`: a mask of these rows [R], the bytes of their blocks [rows, bytes],
        which begin with the block of the region's first column, and the block type."""
        rows = tuple(slice(start, stop) for start, stop in region[:-1])
        places = self.index.reshape(self.shape[:-1])[rows].reshape(-1)
        low = 0
        for tensor in self.stored_tensors:
            lines, kind = math.prod(tensor.shape[:-1]), tensor.type
            here = (places >= low) & (places < low + lines)
            first, last = region[-1][0] // kind.block, -(-region[-1][1] // kind.block)
            if here.any() and first < last:
                columns = slice(first * kind.size_bytes, last * kind.size_bytes)
                yield torch.from_numpy(here), mapped(tensor)[places[here] - low, columns], kind
            low += lines


@dataclass(frozen=True, eq=False)
class FloatRows(RowWeight, StoredFloats):
    """`RowWeight` of float types."""


@dataclass(frozen=True, eq=False)
class AffineRows(RowWeight, AffineWeight):
    """Integers with one scale per block: the values that the package gguf computes, divided by the scales."""

    def parts(self, region: Region, files: Reader) -> Quantised:
        """Integers, scales and the zero point in `region`."""
        values, affine = self.read(region, files), AFFINE[self.stored_tensors[0].type.name]
        scales = torch.empty(values.shape[:-1].numel(), values.shape[-1])
        for here, raw, kind in self._stored(region):
            wide = np.repeat(affine.scales(raw.reshape(-1, kind.size_bytes)), affine.group, axis=1)
            scales[here] = _columns(wide.reshape(len(raw), -1), region, kind.block)
        scales, zero = scales.reshape(values.shape), self.zero_points(files)
        integers = (values / scales).nan_to_num(0.0, 0.0, 0.0).round().add(zero)  # 0 / 0 is 0
        return Quantised(integers.to(torch.uint8), scales, zero)


@dataclass(frozen=True, eq=False)
class WholeWeight(StoredFloats):
    """A weight computed from a whole tensor, e.g. a norm stored with 1 added, or a transposed table."""

    stored_tensors: tuple[GgufTensor, ...]
    """Only one."""
    process: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        if self not in files.computed:
            (tensor,) = self.stored_tensors
            made = self.process(dequantised(mapped(tensor), tensor.type.number).reshape(tensor.shape))
            files.computed[self] = torch.from_numpy(np.ascontiguousarray(made, np.float32)).reshape(self.shape)
        return files.computed[self][tuple(slice(start, stop) for start, stop in region)]


def row_weight(name: str, shape: tuple[int, ...], tensors: tuple[GgufTensor, ...], index: Index) -> StoredWeight:
    """The weight of some rows of tensors of one row length, with integers where the type has them."""
    kinds = {tensor.type.name: tensor.type for tensor in tensors}
    kind, dtype = tensors[0].type, "float32"
    if all(each.floats is not None for each in kinds.values()):
        dtype = kind.floats if len(kinds) == 1 and kind.floats else dtype
        return FloatRows(name, shape, tensors, dtype, index)
    affine = AFFINE.get(kind.name) if len(kinds) == 1 else None
    if affine is None:
        return RowWeight(name, shape, tensors, dtype, index)
    return AffineRows(name, shape, tensors, dtype, affine.bits, len(shape) - 1, affine.group, index)


FACTORS = "rope_freqs.weight"
"""Divisors of the rotary embedding's frequencies, as in llama 3.1, which become settings of the config."""
TRANSFORMERS: Any = modeling_gguf_pytorch_utils
Array = npt.NDArray[Any]


def weights_of(header: Header, config: PreTrainedConfig) -> dict[str, StoredWeight]:
    """Parameter name -> its weight. Raises UnsupportedModelError without a mapping, CheckpointError."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    settings = {**config.to_dict(), "num_attention_heads": getattr(config, "num_attention_heads", None)}
    kind = TRANSFORMERS.TENSOR_PROCESSORS.get(header.architecture, TRANSFORMERS.TensorProcessor)
    mapping: dict[str, str] = TRANSFORMERS.get_gguf_hf_weights_map(model, kind(config=settings))
    tensors = {name: tensor for name, tensor in header.tensors.items() if name != FACTORS}
    firsts = dict(zip(tensors, np.cumsum([1, *map(_lines, tensors.values())]).tolist(), strict=False))
    values, sources_of = _run(header.path, kind(config=settings), tensors, firsts, mapping)
    placed = {tensor.name for sources in sources_of.values() for tensor in sources}
    if left := sorted(set(tensors) - placed):
        raise UnsupportedModelError(
            f"{header.path}: transformers' reader of {header.architecture} ignores {few(left)}, which "
            "change the outputs of the model"
        )
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found: dict[str, StoredWeight] = {}
    for name, sources in sources_of.items():
        if np.any(values[name] == 0):  # square roots of row numbers from 2 on become 0 in no processor
            expected = [gguf for gguf, place in mapping.items() if place == name]
            lacks = [gguf for gguf in expected if not {gguf, f"{gguf}.weight"} & placed]
            raise CheckpointError(
                f"{header.path}: it contains {few([tensor.name for tensor in sources])}, a part of "
                f"{name}, but lacks {few(sorted(lacks)) or 'the rest'}; download it again"
            )
        index = _rows(values[name], sources, firsts)
        if index is not None:
            shape = (*values[name].shape[:-1], sources[0].shape[-1])
            found[name] = row_weight(name, shape, tuple(sources), index)
        elif len(sources) == 1:
            found[name] = _whole_weight(kind(config=settings), name, sources[0], mapping)
        else:
            raise CheckpointError(f"{header.path}: {few([tensor.name for tensor in sources])} do not match each other")
    if wrong := [name for name, weight in found.items() if shapes.get(name, weight.shape) != weight.shape]:
        texts = [f"{n} is {list(found[n].shape)}, but its settings require {list(shapes[n])}" for n in wrong]
        raise CheckpointError(f"{header.path}: settings and tensors do not match: {few(texts, '; ')}")
    return found


def _lines(tensor: GgufTensor) -> int:
    """Number of rows of a tensor; of a vector, its length."""
    return math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]


def _run(
    path: Path, processor: Any, tensors: Mapping[str, GgufTensor], firsts: Mapping[str, int], mapping: Mapping[str, str]
) -> tuple[dict[str, Array], dict[str, list[GgufTensor]]]:
    """Run a processor on the square roots of row numbers [..., 1], or of the indices in a vector.

    Returns the values and the tensors of each parameter.
    """
    sources: dict[str, list[GgufTensor]] = {}
    parsed = _AccessedTensors()
    for name, tensor in tensors.items():
        shape = (*tensor.shape[:-1], 1) if len(tensor.shape) > 1 else tensor.shape
        roots = np.sqrt(np.arange(_lines(tensor), dtype=np.float64) + firsts[name] + 1).reshape(shape)
        parsed.accessed.clear()
        try:
            _processed(processor, roots, name, mapping, parsed)
        except (ValueError, ArithmeticError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: settings and tensors do not match: transformers' reader makes no weight from "
                f"{name}, which is {list(tensor.shape)} ({first_line(error)}); download the file again"
            ) from error
        for key in parsed.accessed:
            sources.setdefault(key, []).append(tensor)
    return {key: value.numpy() for key, value in parsed.items()}, sources


class _AccessedTensors(dict[str, torch.Tensor]):
    """The outputs of a processor by name, with the names read or written since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self.accessed: dict[str, None] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        self.accessed[key] = None
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.accessed[key] = None
        super().__setitem__(key, value)


def _processed(
    processor: Any, values: Array, name: str, mapping: Mapping[str, str], found: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs of a processor for one tensor, by name in the model. `found`: the outputs for earlier tensors."""
    parsed = {"tensors": found}
    with np.errstate(all="ignore"):
        result = processor.process(weights=values, name=name, tensor_key_mapping=mapping, parsed_parameters=parsed)
    if result.name is not None and result.name in mapping:
        found[mapping[result.name]] = torch.from_numpy(np.copy(result.weights))
    return found


def _rows(roots: Array, sources: list[GgufTensor], firsts: Mapping[str, int]) -> Index | None:
    """Indices into the concatenated rows of `sources`; None where rows are not only permuted."""
    if any(len(tensor.shape) < 2 for tensor in sources) or len({tensor.shape[-1] for tensor in sources}) != 1:
        return None
    squares = np.rint(np.square(roots, dtype=np.float64))
    if roots.shape[-1] != 1 or not np.array_equal(np.sqrt(squares), roots):
        return None
    numbers = squares.reshape(-1).astype(np.int64) - 1
    index = np.full(roots.size, -1, np.int64)
    start = 0
    for tensor in sources:
        local = numbers - firsts[tensor.name]
        inside = (local >= 0) & (local < _lines(tensor))
        index[inside] = local[inside] + start
        start += _lines(tensor)
    return index if len(index) == start and np.array_equal(np.sort(index), np.arange(start)) else None


def _whole_weight(processor: Any, name: str, tensor: GgufTensor, mapping: Mapping[str, str]) -> WholeWeight:
    """A weight that is computed from a whole tensor."""

    def process(values: Array) -> Array:
        return _processed(processor, values, tensor.name, mapping, {})[name].numpy()

    shape = process(np.ones(tensor.shape, np.float32)).shape
    return WholeWeight(name, shape, (tensor,), "float32", process)
