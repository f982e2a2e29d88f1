"""The search for mixed precision: the divergence that quantising each weight causes, and the bytes that it saves.

First each weight is quantised alone, and the divergence from the source model is measured. Weights are ordered by the
divergence that more bits save per byte: first to eight bits, then to the activation dtype. The mixes are the prefixes
of that order, each judged with all weights quantised. The divergence is the mean of log (p / q) over p, i.e. the log of
the expected perplexity ratio, with far less noise than the ratio on a few thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from partita.dtypes import PRECISIONS, dtype_numbered
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise.calibrate.reference import ROWS_ELEMENTS, Parameters, Rows, put_back, untie
from partita.export.quantise.keep_setting import Keep, paths
from partita.export.quantise.plan import Plan
from partita.export.quantise.write.rewrite import PlacedWeight
from partita.export.quantise.write.weight_source import QuantisedSource, restored
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify.quality import perplexity
from partita.export.verify.texts import Text
from partita.export.weights.origins import blocks

FULL = 32
"""Bits of an unquantised weight."""
MOST_UNITS = 64
"""With more weights than this, weights at the same place of several layers form one unit."""
MOST_TOKENS = 2048
MOST_LOGITS = 1 << 27
"""Maximum number of stored logits of the source model, 4 bytes each."""
FEWEST_TOKENS = 256
WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that share one number of bits."""

    placed: tuple[PlacedWeight, ...]
    widths: tuple[int, ...]
    """Possible bits, ascending; the first is that of the package."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Module names for `--keep`."""
        return tuple(dict.fromkeys(pattern for each in self.placed for pattern in _patterns(each)))

    @property
    def readers(self) -> tuple[str, ...]:
        """Module names for `--keep` that leave all uses unquantised, including an embedding shared with the head."""
        return tuple(dict.fromkeys([*self.patterns, *(module for each in self.placed for module in each.modules)]))

    @property
    def name(self) -> str:
        """The first module, and the number of others."""
        first, *others = self.patterns
        return f"{first} and {len(others)} more" if others else first

    @property
    def unpacked(self) -> str:
        """The precision of its unquantised weights: that of the activations."""
        dtype = dtype_numbered(int(self.placed[0].packed.dtype)).name
        return next(name for name, each in PRECISIONS.items() if each.bits is None and each.dtype == dtype)

    def size(self, bits: int, plan: Plan) -> int:
        """Size in the package in bytes."""
        return sum(_size(each.packed, bits, plan) for each in self.placed)


@dataclass(frozen=True, slots=True)
class Step:
    """More bits for one unit."""

    unit: Unit
    bits: int


@dataclass(frozen=True, slots=True)
class MixDivergence:
    """The measured divergence of a mix."""

    steps: int
    """The number of applied steps."""
    kl_mean: float
    perplexity_ratio: float


@dataclass(slots=True)
class Ladder:
    """All mixes of a package: each prefix of the steps is one."""

    steps: tuple[Step, ...]
    costs: tuple[tuple[Unit, float], ...]
    """Divergence with one unit quantised alone, the largest first."""
    judge: Callable[[int], MixDivergence]
    tried: dict[int, MixDivergence] = field(default_factory=dict)

    def keep(self, count: int) -> tuple[Keep, ...]:
        """The `--keep` settings of the mix with `count` steps."""
        units = {step.unit.patterns: step for step in self.steps[:count]}
        return tuple(
            Keep(name, step.unit.unpacked if step.bits == FULL else f"int{step.bits}")
            for patterns, step in units.items()
            for name in (step.unit.readers if step.bits == FULL else patterns)
        )

    def measure_mix(self, count: int) -> MixDivergence:
        """The measurement of the mix with `count` steps, cached."""
        if count not in self.tried:
            self.tried[count] = self.judge(count)
        return self.tried[count]

    def smallest(self, divergence: float, least: int = 0) -> int | None:
        """The minimum steps, at least `least`, that reach the divergence; None when all steps do not.

        Binary search, as if every step reduced the divergence.
        """
        low, high = least, len(self.steps)
        if low > high or self.measure_mix(high).kl_mean > divergence:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.measure_mix(middle).kl_mean <= divergence:
                high = middle
            else:
                low = middle + 1
        return high

    def largest(self, size_bytes: int, base_bytes: int, plan: Plan) -> int | None:
        """The maximum steps with which weights of `base_bytes` stay within a size; None when zero steps exceed it."""
        size = base_bytes
        if size > size_bytes:
            return None
        now: dict[tuple[str, ...], int] = {}
        for count, step in enumerate(self.steps):
            before = now.get(step.unit.patterns, step.unit.widths[0])
            size += step.unit.size(step.bits, plan) - step.unit.size(before, plan)
            if size > size_bytes:
                return count
            now[step.unit.patterns] = step.bits
        return len(self.steps)


def units(placed: Sequence[PlacedWeight], plan: Plan) -> list[Unit]:
    """The units that may get more bits: those with the bits of the package and without a `--keep` setting."""
    widths = tuple(dict.fromkeys(bits for bits in (plan.bits, 8, FULL) if bits >= plan.bits))
    said = {_patterns(each) for each in placed if _setting_matches(plan, each)}
    free = [each for each in placed if each.packed.packing.grid.bits == plan.bits and _patterns(each) not in said]
    step = 1
    while len(grouped := _weights_by_place(free, step)) > MOST_UNITS and step < len(free):
        step += 1
    return [Unit(tuple(group), widths) for group in grouped]


def _setting_matches(plan: Plan, placed: PlacedWeight) -> bool:
    """Whether a `--keep` setting matches a weight by its units' or its own names."""
    names = (*_patterns(placed), *paths(placed.packed.parameters))
    return any(keep.fits(name) for keep in plan.keep for name in names)


def _weights_by_place(placed: Sequence[PlacedWeight], step: int) -> list[list[PlacedWeight]]:
    """Weights grouped by their place in a layer, over `step` consecutive layers."""
    groups: dict[tuple[object, int], list[PlacedWeight]] = {}
    if step == 1:
        for each in placed:  # stacks of one operator on experts share their bits
            groups.setdefault((_patterns(each), 0), []).append(each)
        return list(groups.values())
    for each in placed:
        parts = _patterns(each)[0].split(".")
        number = next((int(part) for part in parts if part.isdigit()), 0)
        role = ".".join("*" if part.isdigit() else part for part in parts)
        groups.setdefault((role, number // step), []).append(each)
    return list(groups.values())


def ladder(
    model: Any,
    placed: Sequence[PlacedWeight],
    names: Parameters,
    plan: Plan,
    text: Text,
    advance: Callable[[int], object],
) -> Ladder:
    """Measure the divergence of each unit of `placed`, and order the steps.

    `model`: the transformers model with its own weights. Weights outside the units stay quantised. `names`: checkpoint
    tensor -> parameters. `advance` gets the bytes of measured weights.
    """
    found = units(placed, plan)
    with torch.no_grad(), quiet(), translate_errors("running the source model"):
        untie(model, placed, names)
        judge = DivergenceMeter(model, torch.from_numpy(text.windows))
        state = _State(model, names, plan)
        free = {each.packed.key for unit in found for each in unit.placed}
        for each in placed:
            if each.packed.key not in free:
                put_back(model, each, names, state.rows(each, each.packed.packing.grid.bits))
        floor = judge.judge()[0]
        costs = []
        for unit in found:
            state.set(unit, unit.widths[0])
            costs.append((unit, max(0.0, judge.judge()[0] - floor)))
            state.set(unit, FULL)
            advance(unit.size(FULL, plan))

    def measured(count: int) -> MixDivergence:
        with torch.no_grad(), quiet(), translate_errors("running the source model"):
            widths = {unit.patterns: unit.widths[0] for unit in found}
            widths |= {step.unit.patterns: step.bits for step in steps[:count]}
            for unit in found:
                state.set(unit, widths[unit.patterns])
            return MixDivergence(count, *judge.judge())

    steps = ordered_steps(costs, plan)
    return Ladder(steps, tuple(sorted(costs, key=lambda pair: -pair[1])), measured)


def ordered_steps(costs: Sequence[tuple[Unit, float]], plan: Plan) -> tuple[Step, ...]:
    """Steps of all units: first to the next bits, then to the bits after it, by saved divergence per byte."""
    steps: list[Step] = []
    widths = costs[0][0].widths if costs else ()
    for before, after in pairwise(widths):
        worth = {unit.patterns: cost / max(1, unit.size(after, plan) - unit.size(before, plan)) for unit, cost in costs}
        row = [Step(unit, after) for unit, _ in costs]
        steps += sorted(row, key=lambda step, worth=worth: -worth[step.unit.patterns])  # type: ignore[misc]
    return tuple(steps)


@dataclass(slots=True)
class _State:
    """The model with some units quantised."""

    model: Any
    names: Parameters
    plan: Plan
    now: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Bits of the units that differ from the source model."""

    def set(self, unit: Unit, bits: int) -> None:
        """Set the bits of a unit."""
        if self.now.get(unit.patterns, FULL) == bits:
            return
        for each in unit.placed:
            put_back(self.model, each, self.names, self.rows(each, bits))
        self.now[unit.patterns] = bits

    def rows(self, placed: PlacedWeight, bits: int) -> Rows:
        """Rows of a weight with these bits."""
        packed = placed.packed
        if bits == FULL:
            return _own_rows(packed)
        packed = _requantise(packed, bits, self.plan)
        return ((start, restored(rows)[:, : packed.width]) for start, rows in packed.rows_quantised())


def restore(model: Any, placed: Sequence[PlacedWeight], names: Parameters) -> None:
    """Restore the checkpoint's weights in `model`."""
    for each in placed:
        put_back(model, each, names, _own_rows(each.packed))


def _own_rows(packed: QuantisedSource) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of a weight as in the checkpoint."""
    with OpenFiles(packed.checkpoint.folder) as files:
        for region in blocks(packed.origin.shape, ROWS_ELEMENTS):
            yield region[0][0], packed.origin.read(region, files).to(torch.float32)


class DivergenceMeter:
    """The outputs of the source model on a text, and the divergence of a changed model from them."""

    def __init__(self, model: Any, windows: torch.Tensor) -> None:
        self.model, self.windows = model, windows
        self.expected = [self._answers(window) for window in windows]

    def _answers(self, window: torch.Tensor) -> torch.Tensor:
        """log p [L - 1, V] of the next token at each position."""
        logits = self.model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        return logits.log_softmax(-1)  # type: ignore[no-any-return]

    def judge(self) -> tuple[float, float]:
        """Mean divergence in nats, and the perplexity ratio."""
        divergence = worse = 0.0
        count = 0
        for window, expected in zip(self.windows, self.expected, strict=True):
            found, token = self._answers(window), window[1:, None]
            shares = expected.exp()
            divergence += float((shares * (expected - found)).masked_fill_(shares == 0, 0.0).sum())
            worse += float((expected.gather(1, token) - found.gather(1, token)).sum())
            count += len(found)
        return divergence / count, perplexity(worse / count)


def _patterns(placed: PlacedWeight) -> tuple[str, ...]:
    """The module names that identify a weight: of its parameters for joined weights, else of its products."""
    if not placed.of_experts and (own := paths(placed.packed.parameters)):
        return own
    alike = len({module.rpartition(".")[2] for module in placed.modules}) == 1  # an embedding and a head are not alike
    return placed.modules if alike else placed.modules[:1]


def _size(packed: QuantisedSource, bits: int, plan: Plan) -> int:
    if bits == FULL:
        return own_bytes(packed)
    return sum(part.size_bytes for part in _requantise(packed, bits, plan).parts)


def own_bytes(packed: QuantisedSource) -> int:
    """Size of an unquantised weight in bytes."""
    return packed.elements * packed.dtype.bitwidth // 8


def _requantise(packed: QuantisedSource, bits: int, plan: Plan) -> QuantisedSource:
    """A quantised weight with other bits.

    Block sizes that divide its rows are valid for any bits; where none does (an embedding), the block size stays.
    """
    now = packed.packing
    if now.grid.bits == bits:
        return packed
    other = plan.packed(bits, packed.width) or replace(now, grid=replace(now.grid, bits=bits))
    return replace(packed, packing=other)
