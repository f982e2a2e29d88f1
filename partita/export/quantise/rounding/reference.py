"""The original model with the rounded weights of a package, which its graph is checked against.

The weights are read back from the file that was just written, a few rows at a time, and put where the originals were.
So a graph that agrees with it computes what the model computes with those weights, and what the rounding itself costs
is left to `quality`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from partita.export.checkpoint.naming import Sources
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.quantise.write.rewrite import Placed
from partita.export.weights import spilled
from partita.export.weights.origins import Computed, Joined, Origin, Region, Rescaled, Stored, blocks
from partita.export.weights.sources import Plain

ROWS_ELEMENTS = 1 << 22
"""Weights that are put back at a time."""


def movable(sources: Sources) -> Callable[[Plain], bool]:
    """Whether the numbers of a weight are those of parameters, each in one place, so that they can be put back."""
    single = {origin.info.name for origin in sources.found.values() if isinstance(origin, Stored)}
    stacked = [_names_of(origin) for origin in sources.found.values() if _rearranged(origin)]

    def fits(plain: Plain) -> bool:
        if not moves(plain.origin):
            return False
        inside = single.union(*(names for names in stacked if names <= plain.tensors))
        return plain.tensors <= single or (_is_whole(plain.origin) and plain.tensors <= inside)

    return fits


def _names_of(origin: Origin) -> frozenset[str]:
    """The tensors that an origin reads."""
    return frozenset(info.name for info in origin.tensors())


def _rearranged(origin: Origin) -> bool:
    """Whether a parameter is several tensors, or parts of one, and has every number of theirs once: a stack of experts,
    mostly.
    """
    return not isinstance(origin, Stored) and moves(origin) and _is_whole(origin)


def _is_whole(origin: Origin) -> bool:
    """Whether an origin that only moves numbers has all of the tensors that it reads."""
    return math.prod(origin.shape) == sum(math.prod(info.shape) for info in set(origin.tensors()))


def moves(origin: Origin) -> bool:
    """Whether an origin only brings numbers to other places."""
    if isinstance(origin, Computed | Rescaled):
        return False
    if isinstance(origin, Joined):
        return all(moves(part) for part in origin.parts)
    whole = getattr(origin, "whole", None)
    return whole is None or moves(whole)


def round_weights(model: Any, placed: Iterable[Placed], sources: Sources) -> None:
    """Give `model`, of transformers, the weights that were written, in place."""
    names, placed = parameter_names(model, sources), list(placed)
    with torch.no_grad():
        untie(model, placed, names)
        for each in placed:
            put_back(model, each, names, written_rows(each))
            spilled.let_go(model)


def untie(model: Any, placed: Sequence[Placed], names: Parameters) -> None:
    """Give parameters of their own to what is tied in `model` and is not rounded alike, or not by all who read it."""
    for tensor, shared in names.single.items():
        modules = {name.rpartition(".")[0] for name in shared}
        if all(modules <= set(each.modules) for each in placed if tensor in each.packed.tensors):
            continue  # tied, and the same bytes for all: they stay one tensor
        for name in shared[1:]:  # head and embedding were rounded in different ways, or one of them was not
            _set(model, name, torch.nn.Parameter(_get(model, name).detach().clone(), requires_grad=False))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Which parameters of a model the tensors of its checkpoint are."""

    single: Mapping[str, list[str]]
    """Tensor of the checkpoint -> every parameter that it is."""
    stacked: tuple[tuple[str, Origin], ...]
    """Parameters that are several tensors, moved, and where their numbers lie."""

    def stacked_of(self, tensors: frozenset[str]) -> list[tuple[str, Origin]]:
        """Those that have no tensors but these."""
        return [(name, origin) for name, origin in self.stacked if _names_of(origin) <= tensors]


def parameter_names(model: Any, sources: Sources) -> Parameters:
    """Which parameters of `model` the tensors of the checkpoint are."""
    single: dict[str, list[str]] = {}
    stacked = []
    for name in dict(model.named_parameters(remove_duplicate=False)):
        # A checkpoint may hold a tied weight under each of its names; equal, or they would not be tied.
        all_names = (name, *sorted(sources.tied.get(name, frozenset()) - {name}))
        origins = [sources.found[each] for each in all_names if each in sources.found]
        stored = dict.fromkeys(each.info.name for each in origins if isinstance(each, Stored))
        for tensor in stored:
            single.setdefault(tensor, []).append(name)
        if origins and not stored and _rearranged(origins[0]):
            stacked.append((name, origins[0]))
    return Parameters(single, tuple(stacked))


Rows = Iterable[tuple[int, torch.Tensor]]
"""The number of the first row, and rows [R, K] float32, all rows of a weight in order."""


def put_back(model: Any, placed: Placed, names: Parameters, rows_of: Rows) -> None:
    """Write rows of one weight over its parameters, in place: those of the modules that read it, where several have
    the same tensor.
    """
    if stacked := names.stacked_of(placed.packed.tensors):
        _put_stacks_back(model, placed, names, stacked, rows_of)
        return
    targets: dict[str, list[torch.Tensor]] = {}
    for tensor in placed.packed.tensors:
        found = names.single[tensor]
        own = [name for name in found if name.rpartition(".")[0] in placed.modules]
        targets[tensor] = [_get(model, name).detach() for name in own or found]
    for start, rows in rows_of:
        region = ((start, start + len(rows)), (0, placed.packed.width))
        origin = placed.packed.origin
        if isinstance(origin, Stored):
            for parameter in targets[origin.info.name]:
                parameter[start : start + len(rows)] = rows
            continue
        places = Places(origin.tensors())
        index = origin.read(region, places)
        for info, first in places.first.items():
            inside = (index >= first) & (index < first + math.prod(info.shape))
            for parameter in targets[info.name]:
                parameter.view(-1)[index[inside] - first] = rows[inside]


def _put_stacks_back(
    model: Any, placed: Placed, names: Parameters, stacked: Iterable[tuple[str, Origin]], rows_of: Rows
) -> None:
    """The same where parameters are several tensors: first the tensors get their numbers, then the parameters read them
    as they are read from a checkpoint. In memory is one weight more, in float32.
    """
    origin = placed.packed.origin
    places = Places(origin.tensors())
    flat = torch.empty(sum(math.prod(info.shape) for info in places.first))
    for start, rows in rows_of:
        index = origin.read(((start, start + len(rows)), (0, placed.packed.width)), places)
        flat[index.reshape(-1)] = rows.reshape(-1)
    tensors = _Tensors({info: flat[first : first + math.prod(info.shape)] for info, first in places.first.items()})
    for info in places.first:
        for name in names.single.get(info.name, ()):
            _get(model, name).detach().copy_(tensors.values[info].view(info.shape))
    for name, where in stacked:
        parameter = _get(model, name).detach()
        for region in blocks(where.shape, ROWS_ELEMENTS):
            parameter[tuple(slice(begin, end) for begin, end in region)] = where.read(region, tensors)


class _Tensors(OpenFiles):
    """Tensors of the checkpoint that are in memory."""

    def __init__(self, values: Mapping[TensorInfo, torch.Tensor]) -> None:
        self.values = values

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The numbers of a tensor in `region`."""
        return self.values[info].view(info.shape)[tuple(slice(begin, end) for begin, end in region)]


class Places(OpenFiles):
    """Files in which every number is its own place: read through an origin, they say where its numbers come from."""

    def __init__(self, infos: Iterable[TensorInfo]) -> None:
        self.first: dict[TensorInfo, int] = {}
        total = 0
        for info in dict.fromkeys(infos):
            self.first[info] = total
            total += math.prod(info.shape)

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """Places of the numbers of a tensor in `region`."""
        places = torch.full((), self.first[info], dtype=torch.int64)
        stride = 1
        for axis in reversed(range(len(region))):
            begin, end = region[axis]
            along = torch.arange(begin, end, dtype=torch.int64) * stride
            places = places + along.reshape(-1, *[1] * (len(region) - 1 - axis))
            stride *= info.shape[axis]
        return places


def written_rows(placed: Placed) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of a weight as they were written, float32 [R, K], with the number of the first, all rows in order."""
    packed = placed.packed
    written = [_written(value) for value in placed.values]
    step = max(2, ROWS_ELEMENTS // packed.width) & ~1
    for start in range(0, packed.rows, step):
        found = packed.layout.read(packed, written, start, min(start + step, packed.rows))
        steps = found.integers.float() - found.zeros.float().unsqueeze(-1)
        yield start, (steps * found.scales.unsqueeze(-1)).flatten(1)[:, : packed.width]


def _written(value: Any) -> np.ndarray[Any, Any]:
    """The bytes of a part; mapped from the file, and copied where a piece is taken."""
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return np.memmap(tensor.path, np.uint8, "r", offset=tensor.offset or 0, shape=(tensor.nbytes,))


def _get(model: Any, name: str) -> torch.Tensor:
    module, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(module), last)
    assert isinstance(found, torch.Tensor)
    return found


def _set(model: Any, name: str, parameter: torch.nn.Parameter) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, parameter)
