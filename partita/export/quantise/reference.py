"""The source model with the quantised weights of a package, against which the graph is verified.

The weights are read back from the written file, a few rows at a time. The loss by quantisation itself is measured by
`quality`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from partita.export.checkpoint.naming import Sources
from partita.export.quantise.rewrite import Narrowed, PlacedWeight
from partita.export.quantise.weight_source import restored
from partita.export.weights import memory_map, of_ir, to_torch
from partita.export.weights.origins import (
    ComputedOrigin,
    IndexReader,
    JoinedOrigin,
    LeafReader,
    Origin,
    RescaledOrigin,
    TensorInfo,
    blocks,
)
from partita.export.weights.sources import FloatSource

ROWS_ELEMENTS = 1 << 20
"""Weights that are put back at a time."""


def movable(sources: Sources) -> Callable[[FloatSource], bool]:
    """Whether every value of a weight is a value of one parameter, so that it can be put back."""
    single = {origin.name for origin in sources.origins.values() if isinstance(origin, TensorInfo)}
    stacked = [_names_of(origin) for origin in sources.origins.values() if _rearranged(origin)]

    def fits(plain: FloatSource) -> bool:
        if not only_rearranges(plain.origin):
            return False
        covered = single.union(*(names for names in stacked if names <= plain.tensors))
        return plain.tensors <= single or (_is_whole(plain.origin) and plain.tensors <= covered)

    return fits


def _names_of(origin: Origin) -> frozenset[str]:
    return frozenset(info.name for info in origin.tensors())


def _rearranged(origin: Origin) -> bool:
    """Whether a parameter is a permutation of several whole tensors, e.g. a stack of experts."""
    return not isinstance(origin, TensorInfo) and only_rearranges(origin) and _is_whole(origin)


def _is_whole(origin: Origin) -> bool:
    """Whether an origin that only moves values reads every value of its tensors."""
    return math.prod(origin.shape) == sum(math.prod(info.shape) for info in set(origin.tensors()))


def only_rearranges(origin: Origin) -> bool:
    """Whether an origin only moves values."""
    if isinstance(origin, ComputedOrigin | RescaledOrigin):
        return False
    if isinstance(origin, JoinedOrigin):
        return all(only_rearranges(part) for part in origin.parts)
    whole = getattr(origin, "source", None)
    return whole is None or only_rearranges(whole)


def round_weights(model: Any, placed: Iterable[PlacedWeight | Narrowed], sources: Sources) -> None:
    """Give `model`, a transformers model, the written weights, in place."""
    names, placed = parameter_names(model, sources), list(placed)
    with torch.no_grad():
        untie(model, placed, names)
        for each in placed:
            if isinstance(each, PlacedWeight):
                put_back(model, each, names, written_rows(each))
            else:
                stacked = [name for name, _ in names.stacked_of(each.packed.tensors)]
                found = [name for tensor in each.packed.tensors for name in names.single.get(tensor, ())]
                for name in _of_modules([*found, *stacked], each.modules):
                    parameter = model.get_parameter(name)
                    parameter.copy_(parameter.to(to_torch(of_ir(each.packed.dtype))))
            memory_map.let_go(model)


def _of_modules(names: list[str], modules: Sequence[str]) -> list[str]:
    """The parameters of these modules; all of them where none is."""
    return [name for name in names if name.rpartition(".")[0] in modules] or names


def untie(model: Any, placed: Sequence[PlacedWeight | Narrowed], names: Parameters) -> None:
    """Untie parameters of `model` whose uses are quantised differently, or not all quantised."""
    for tensor, shared in names.single.items():
        modules = {name.rpartition(".")[0] for name in shared}
        if all(modules <= set(each.modules) for each in placed if tensor in each.packed.tensors):
            continue  # quantised alike for all uses: stays one tensor
        for name in shared[1:]:  # head and embedding were quantised differently, or one was not
            own = torch.nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False)
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, own)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model for each checkpoint tensor."""

    single: Mapping[str, list[str]]
    """Checkpoint tensor -> every parameter that equals it."""
    stacked_origins: tuple[tuple[str, Origin], ...]
    """Parameters from several tensors, with their origins."""

    def stacked_of(self, tensors: frozenset[str]) -> list[tuple[str, Origin]]:
        """The stacked parameters that read only these tensors."""
        return [(name, origin) for name, origin in self.stacked_origins if _names_of(origin) <= tensors]


def parameter_names(model: Any, sources: Sources) -> Parameters:
    """The parameters of `model` for each checkpoint tensor."""
    single: dict[str, list[str]] = {}
    stacked = []
    for name in dict(model.named_parameters(remove_duplicate=False)):
        # A checkpoint may store a tied weight under each of its names.
        all_names = (name, *sorted(sources.tied_names.get(name, frozenset()) - {name}))
        origins = [sources.origins[each] for each in all_names if each in sources.origins]
        stored = dict.fromkeys(each.name for each in origins if isinstance(each, TensorInfo))
        for tensor in stored:
            single.setdefault(tensor, []).append(name)
        if origins and not stored and _rearranged(origins[0]):
            stacked.append((name, origins[0]))
    return Parameters(single, tuple(stacked))


Rows = Iterable[tuple[int, torch.Tensor]]
"""The index of the first row, and rows [R, K] float32; all rows of a weight in order."""


def put_back(model: Any, placed: PlacedWeight, names: Parameters, rows_of: Rows) -> None:
    """Write rows of a weight into its parameters, in place. With several, those of the modules that read it."""
    if stacked := names.stacked_of(placed.packed.tensors):
        _put_stacks_back(model, placed, names, stacked, rows_of)
        return
    targets = {
        tensor: [model.get_parameter(name).detach() for name in _of_modules(names.single[tensor], placed.modules)]
        for tensor in placed.packed.tensors
    }
    for start, rows in rows_of:
        _put_rows_back(placed.packed.origin, start, rows, targets)


def _put_rows_back(origin: Origin, start: int, rows: torch.Tensor, targets: Mapping[str, list[torch.Tensor]]) -> None:
    """Write `rows` of an origin, whole rows from `start`, into the parameters of its checkpoint tensors."""
    if isinstance(origin, TensorInfo):
        for parameter in targets[origin.name]:
            parameter[start : start + len(rows)] = rows
        return
    if isinstance(origin, JoinedOrigin) and origin.axis == 0:
        offset = 0
        for part in origin.parts:
            begin, end = max(start, offset), min(start + len(rows), offset + part.shape[0])
            if begin < end:
                _put_rows_back(part, begin - offset, rows[begin - start : end - start], targets)
            offset += part.shape[0]
        return
    places = IndexReader(origin.tensors())
    index = origin.read(((start, start + len(rows)), (0, origin.shape[1])), places)
    for info, first in places.first.items():
        is_here = (index >= first) & (index < first + math.prod(info.shape))
        for parameter in targets[info.name]:
            parameter.view(-1)[index[is_here] - first] = rows[is_here]


def _put_stacks_back(
    model: Any, placed: PlacedWeight, names: Parameters, stacked: Iterable[tuple[str, Origin]], rows_of: Rows
) -> None:
    """`put_back` for parameters from several tensors: fill these, then read the parameters through their origins."""
    origin = placed.packed.origin
    places = IndexReader(origin.tensors())
    flat = torch.empty(sum(math.prod(info.shape) for info in places.first))
    for start, rows in rows_of:
        index = origin.read(((start, start + len(rows)), (0, placed.packed.width)), places)
        flat[index.reshape(-1)] = rows.reshape(-1)
    values = {info: flat[first:][: math.prod(info.shape)].view(info.shape) for info, first in places.first.items()}
    tensors = LeafReader(lambda info, region: values[info][tuple(slice(begin, end) for begin, end in region)])
    for info, value in values.items():
        for name in names.single.get(info.name, ()):
            model.get_parameter(name).detach().copy_(value)
    for name, where in stacked:
        parameter = model.get_parameter(name).detach()
        for region in blocks(where.shape, ROWS_ELEMENTS):
            parameter[tuple(slice(begin, end) for begin, end in region)] = where.read(region, tensors)


def written_rows(placed: PlacedWeight) -> Iterator[tuple[int, torch.Tensor]]:
    """Dequantised rows of a written weight, float32 [R, K], with the index of the first; all rows in order."""
    packed = placed.packed
    tensors = [value.const_value for value in placed.values if isinstance(value.const_value, ir.ExternalTensor)]
    assert len(tensors) == len(placed.values), "a weight is not written"
    written = [tensor.numpy() for tensor in tensors]
    step = max(1, ROWS_ELEMENTS // packed.width)
    for start in range(0, packed.rows, step):
        found = packed.layout.read(packed, written, start, min(start + step, packed.rows))
        yield start, restored(found)[:, : packed.width]
    del written  # parts of a memory-mapped file
    for tensor in tensors:
        tensor.release()
