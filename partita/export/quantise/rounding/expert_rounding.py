"""Quantise the expert stacks of a layer on a text, each expert by its tokens.

All windows wait before the experts, with their inputs and the router's choice. For each expert, the first stack is
quantised by the mean of x x^T of its tokens; the quantised first stack then gives the inputs of the second. Experts
with few tokens are quantised without the text.
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
"""Experts with fewer tokens are quantised without the text."""
STACKED = "is_concatenated"
"""An attribute that transformers sets on modules with stacked experts in a known layout."""
Routed = tuple[torch.Tensor, torch.Tensor]
"""Inputs of experts [..., H], and the chosen experts of each token [..., K]."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The weights of one layer's experts."""

    up: Placed
    """[E * F, H]."""
    down: Placed
    """[E * H, I]."""


def stacks_of(model: Any, placed: Iterable[Placed]) -> dict[str, Stacks]:
    """Module of the source model -> its stacks, for stacks that can be calibrated."""
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
    """Quantise both stacks of `module` by its inputs `given`, store them in `rounded`, and replace them in the model.

    Returns the number of experts that were quantised without the text. Raises CheckpointError.
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
    """Quantise one stack of `count` experts; returns those with too few tokens."""
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
    """The dequantised rows of a stack."""
    for start, found in rounded.rows(packed.origin, packed.packing.grid, packed.packing.block_size):
        yield start, restored(found)[:, : packed.width]
