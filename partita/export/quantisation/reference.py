"""The original model with the rounded weights of a package, which its graph is checked against.

The weights are read back from the file that was just written, a few rows at a time, and put where the originals were.
So a graph that agrees with it computes what the model computes with those weights, and what the rounding itself costs
is left to `quality`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from partita.export.naming import Sources
from partita.export.origins import Computed, Joined, Origin, Region, Rescaled, Stored
from partita.export.quantisation.rewrite import Placed
from partita.export.weight_files import OpenFiles, TensorInfo
from partita.export.weight_sources import Plain

ROWS_ELEMENTS = 1 << 22
"""Weights that are put back at a time."""


def movable(sources: Sources) -> Callable[[Plain], bool]:
    """Whether the numbers of a weight are those of parameters, each in one place, so that they can be put back."""
    single = {origin.info.name for origin in sources.found.values() if isinstance(origin, Stored)}

    def fits(plain: Plain) -> bool:
        return _moves(plain.origin) and plain.tensors <= single

    return fits


def _moves(origin: Origin) -> bool:
    """Whether an origin only brings numbers to other places."""
    if isinstance(origin, Computed | Rescaled):
        return False
    if isinstance(origin, Joined):
        return all(_moves(part) for part in origin.parts)
    whole = getattr(origin, "whole", None)
    return whole is None or _moves(whole)


def round_weights(model: Any, placed: Iterable[Placed], sources: Sources) -> None:
    """Give `model`, of transformers, the weights that were written, in place."""
    names, placed = parameter_names(model, sources), list(placed)
    with torch.no_grad():
        for tensor, shared in names.items():
            modules = {name.rpartition(".")[0] for name in shared}
            if all(modules <= set(each.modules) for each in placed if tensor in each.packed.tensors):
                continue  # tied, and the same bytes for all: they stay one tensor
            for name in shared[1:]:  # head and embedding were rounded in different ways, or one of them was not
                _set(model, name, torch.nn.Parameter(_get(model, name).detach().clone(), requires_grad=False))
        for each in placed:
            put_back(model, each, names, written_rows(each))


def parameter_names(model: Any, sources: Sources) -> dict[str, list[str]]:
    """Tensor of the checkpoint -> every parameter of `model` that it is."""
    names: dict[str, list[str]] = {}
    for name in dict(model.named_parameters(remove_duplicate=False)):
        origin = sources.of(name)
        if isinstance(origin, Stored):
            names.setdefault(origin.info.name, []).append(name)
    return names


Rows = Iterable[tuple[int, torch.Tensor]]
"""The number of the first row, and rows [R, K] float32, all rows of a weight in order."""


def put_back(model: Any, placed: Placed, names: dict[str, list[str]], rows_of: Rows) -> None:
    """Write rows of one weight over its parameters, in place: those of the modules that read it, where several have
    the same tensor.
    """
    targets: dict[str, list[torch.Tensor]] = {}
    for tensor in placed.packed.tensors:
        found = names[tensor]
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
