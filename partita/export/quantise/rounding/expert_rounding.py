"""Round the stacks of a layer's experts on a text, each expert by the tokens that are sent to it.

All windows wait before the layer's experts, with what they are given and what the router has chosen. One expert after
the other has the mean of x x^T of its tokens, and its part of the first stack is rounded by that; then the rounded one
computes what the second stack is given, and that is rounded likewise. An expert that gets few tokens is rounded without
them: the directions of a few say nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise.rounders import quantiser
from partita.export.quantise.rounding.reference import Parameters, put_back
from partita.export.quantise.rounding.stored import Rounded
from partita.export.quantise.write.packed import Packed, in_parts, restored
from partita.export.quantise.write.rewrite import Placed
from partita.export.trace.experts.base import Experts

FEWEST_TOKENS = 128
"""An expert that gets fewer is rounded without them."""
STACKED = "is_concatenated"
"""An attribute that transformers gives modules whose experts are stacks in a known layout."""
Routed = tuple[torch.Tensor, torch.Tensor]
"""What experts are given [..., H], and the chosen ones of each token [..., K]."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The weights of one layer's experts."""

    up: Placed
    """[E * F, H]."""
    down: Placed
    """[E * H, I]."""


def stacks_of(model: Any, placed: Iterable[Placed]) -> dict[str, Stacks]:
    """Those that can be rounded on a text, by the module of the original model that has them."""
    of: dict[str, list[Placed]] = {}
    for each in placed:
        if each.of_experts and quantiser(each.packed.packing.quantiser).calibrate is not None:
            of.setdefault(each.modules[0], []).append(each)
    modules = dict(model.named_modules())
    return {
        name: Stacks(*pair)
        for name, pair in of.items()
        if len(pair) == 2 and name in modules and _fits(modules[name], *(each.packed for each in pair))
    }


def _fits(module: Any, up: Packed, down: Packed) -> bool:
    """Whether two weights are the stacks of a module, in this order."""
    if not hasattr(module, STACKED):
        return False
    experts = Experts.of(module)
    (count, inner, hidden), (_, width, _) = experts.up.shape, experts.down.shape
    shapes = (up.rows, up.width), (down.rows, down.width)
    return experts.after is None and shapes == ((count * inner, hidden), (count * hidden, width))


def round_experts(
    model: Any, module: Any, stacks: Stacks, given: Sequence[Routed], names: Parameters, rounded: Rounded
) -> int:
    """Round both stacks of `module` by what it is `given`, keep them in `rounded` and put them into the model.

    Returns how many experts were rounded without the text, because it hardly reaches them. Raises CheckpointError.
    """
    experts = Experts.of(module)
    flat = [(each.flatten(0, -2), index.flatten(0, -2)) for each, index in given]
    few: set[int] = set()

    def tokens_of(number: int) -> torch.Tensor:
        return torch.cat([each[(index == number).any(-1)] for each, index in flat]).float()

    def inner_of(number: int) -> torch.Tensor:
        bias = None if experts.up_bias is None else experts.up_bias[number]
        return experts.activate(torch.nn.functional.linear(tokens_of(number), experts.up[number], bias))

    for placed, inputs in ((stacks.up, tokens_of), (stacks.down, inner_of)):
        few |= _round(placed.packed, experts.count, inputs, rounded)
        put_back(model, placed, names, _restored(placed.packed, rounded))
    return len(few)


def _round(packed: Packed, count: int, inputs: Callable[[int], torch.Tensor], rounded: Rounded) -> set[int]:
    """Round one stack of so many experts; returns those that got too few tokens."""
    packing, height, few = packed.packing, packed.rows // count, set()
    calibrated = quantiser(packing.quantiser).calibrate
    assert calibrated is not None
    with OpenFiles(packed.checkpoint.folder) as files, torch.no_grad():
        for number in range(count):
            region = (number * height, (number + 1) * height), (0, packed.width)
            weights = packed.origin.read(region, files).to(torch.float32)
            given = inputs(number)
            if len(given) < FEWEST_TOKENS:
                few.add(number)
                found = in_parts(packed.quantised, weights)
            else:
                by = calibrated(given.T @ given / len(given), packing.grid, packing.block_size)
                found = in_parts(by, weights)
            rounded.add_rows(packed.origin, packing.grid, packing.block_size, region[0][0], found)
    rounded.complete(packed.origin, packing.grid, packing.block_size)
    return few


def _restored(packed: Packed, rounded: Rounded) -> Iterator[tuple[int, torch.Tensor]]:
    """What the integers of a stack stand for."""
    for start, found in rounded.rows(packed.origin, packed.packing.grid, packed.packing.block_size):
        yield start, restored(found)[:, : packed.width]
