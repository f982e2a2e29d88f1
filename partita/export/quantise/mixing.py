"""Which weights are packed wider than the others: what rounding each of them costs on a text, and what it saves.

First every weight is rounded alone, and the divergence of the model from the original is measured. Then the weights
stand in a row by what wider integers save of it for each byte, and the mixes are the beginnings of that row: first to
eight bits, then to what the graph computes in. A mix is judged by the divergence of the model with all its rounded
weights, as a whole. It is the mean of log (p / q) over p, so it is the logarithm of the ratio of perplexities that a
text as the model expects it would have, and far less noisy than the ratio itself on some thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from partita.dtypes import PRECISIONS, numbered
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.quantise.keep import Keep, paths
from partita.export.quantise.plan import Plan
from partita.export.quantise.rounding.reference import ROWS_ELEMENTS, Parameters, Rows, put_back, untie
from partita.export.quantise.write.packed import Packed, restored
from partita.export.quantise.write.rewrite import Placed
from partita.export.trace.fake_model import quiet, translated
from partita.export.verify.quality_figures import perplexity
from partita.export.verify.texts import Text
from partita.export.weights.origins import blocks

FULL = 32
"""Bits of a weight that is not packed."""
MOST_UNITS = 64
"""Weights of several layers that have the same place in them are one unit where there would be more than so many."""
MOST_TOKENS = 2048
MOST_LOGITS = 1 << 27
"""Logits of the original that are kept, 4 bytes each."""
FEWEST_TOKENS = 256
WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that have one width."""

    placed: tuple[Placed, ...]
    widths: tuple[int, ...]
    """Bits that they may have, ascending; the first is that of the package."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Modules that `--keep` names them by."""
        return tuple(dict.fromkeys(pattern for each in self.placed for pattern in _patterns(each)))

    @property
    def readers(self) -> tuple[str, ...]:
        """Modules that have to be named for the weights to stay as they are: an embedding that its head shares would be
        packed anew, for itself.
        """
        return tuple(dict.fromkeys([*self.patterns, *(module for each in self.placed for module in each.modules)]))

    @property
    def name(self) -> str:
        """Of the first module, and how many there are."""
        first, *others = self.patterns
        return f"{first} and {len(others)} more" if others else first

    @property
    def unpacked(self) -> str:
        """The precision that its weights have when they are not packed: what everything else is computed in."""
        dtype = numbered(int(self.placed[0].packed.dtype)).name
        return next(name for name, each in PRECISIONS.items() if each.bits is None and each.dtype == dtype)

    def size(self, bits: int, plan: Plan) -> int:
        """Bytes in the package."""
        return sum(_size(each.packed, bits, plan) for each in self.placed)


@dataclass(frozen=True, slots=True)
class Step:
    """One unit made wider."""

    unit: Unit
    bits: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A mix on the text of the search."""

    steps: int
    """How many of the row are taken."""
    kl_mean: float
    perplexity_ratio: float


@dataclass(slots=True)
class Ladder:
    """All mixes of a package, each the one before it with one unit made wider."""

    steps: tuple[Step, ...]
    costs: tuple[tuple[Unit, float], ...]
    """Divergence when a unit alone is rounded to the width of the package, the largest first."""
    judge: Callable[[int], Judged]
    tried: dict[int, Judged] = field(default_factory=dict)

    def keep(self, count: int) -> tuple[Keep, ...]:
        """What is said of modules in the mix with so many steps."""
        units = {step.unit.patterns: step for step in self.steps[:count]}
        return tuple(
            Keep(name, step.unit.unpacked if step.bits == FULL else f"int{step.bits}")
            for patterns, step in units.items()
            for name in (step.unit.readers if step.bits == FULL else patterns)
        )

    def judged(self, count: int) -> Judged:
        """A mix with so many steps; measured once."""
        if count not in self.tried:
            self.tried[count] = self.judge(count)
        return self.tried[count]

    def smallest(self, divergence: float, least: int = 0) -> int | None:
        """The fewest steps, at least so many, that bring the divergence down to what is given; None when all do not.

        By halving, as if every step brought it down: log2 of the steps are measured.
        """
        low, high = least, len(self.steps)
        if low > high or self.judged(high).kl_mean > divergence:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.judged(middle).kl_mean <= divergence:
                high = middle
            else:
                low = middle + 1
        return high

    def largest(self, size_bytes: int, base_bytes: int, plan: Plan) -> int | None:
        """The most steps with which weights of `base_bytes` stay within a size; None when they do not without any."""
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


def units(placed: Sequence[Placed], plan: Plan) -> list[Unit]:
    """What may be made wider: what has the width of the package and nothing was said of."""
    widths = tuple(dict.fromkeys(bits for bits in (plan.bits, 8, FULL) if bits >= plan.bits))
    said = {_patterns(each) for each in placed if _is_said_of(plan, each)}
    free = [each for each in placed if each.packed.packing.grid.bits == plan.bits and _patterns(each) not in said]
    step = 1
    while len(grouped := _grouped(free, step)) > MOST_UNITS and step < len(free):
        step += 1
    return [Unit(tuple(group), widths) for group in grouped]


def _is_said_of(plan: Plan, placed: Placed) -> bool:
    """Whether `--keep` says something of a weight: by what it is told apart by, or by its own names."""
    names = (*_patterns(placed), *paths(placed.packed.parameters))
    return any(keep.fits(name) for keep in plan.keep for name in names)


def _grouped(placed: Sequence[Placed], step: int) -> list[list[Placed]]:
    """Weights by their place in a layer, `step` layers that follow one another at a time."""
    groups: dict[tuple[object, int], list[Placed]] = {}
    if step == 1:
        for each in placed:  # stacks that one operator on experts reads have one width
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
    placed: Sequence[Placed],
    names: Parameters,
    plan: Plan,
    text: Text,
    advance: Callable[[int], object],
) -> Ladder:
    """Measure what rounding each unit of `placed` costs, and order them.

    `model`: of transformers, with its own weights. What may not be made wider is rounded all along. `names`: tensor of
    the checkpoint -> its parameters. `advance` hears the bytes of weights that were measured.
    """
    found = units(placed, plan)
    with torch.no_grad(), quiet(), translated("running the original model"):
        untie(model, placed, names)
        judge = _Judge(model, torch.from_numpy(text.windows))
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

    def measured(count: int) -> Judged:
        with torch.no_grad(), quiet(), translated("running the original model"):
            widths = {unit.patterns: unit.widths[0] for unit in found}
            widths |= {step.unit.patterns: step.bits for step in steps[:count]}
            for unit in found:
                state.set(unit, widths[unit.patterns])
            return Judged(count, *judge.judge())

    steps = ordered(costs, plan)
    return Ladder(steps, tuple(sorted(costs, key=lambda pair: -pair[1])), measured)


def ordered(costs: Sequence[tuple[Unit, float]], plan: Plan) -> tuple[Step, ...]:
    """All units made wider, first to the next width and then to that after it, by what each saves for a byte."""
    steps: list[Step] = []
    widths = costs[0][0].widths if costs else ()
    for before, after in pairwise(widths):
        worth = {unit.patterns: cost / max(1, unit.size(after, plan) - unit.size(before, plan)) for unit, cost in costs}
        row = [Step(unit, after) for unit, _ in costs]
        steps += sorted(row, key=lambda step, worth=worth: -worth[step.unit.patterns])  # type: ignore[misc]
    return tuple(steps)


@dataclass(slots=True)
class _State:
    """The model with some units rounded."""

    model: Any
    names: Parameters
    plan: Plan
    now: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Bits of those units that are not as they were."""

    def set(self, unit: Unit, bits: int) -> None:
        """Give a unit the width, where it has another."""
        if self.now.get(unit.patterns, FULL) == bits:
            return
        for each in unit.placed:
            put_back(self.model, each, self.names, self.rows(each, bits))
        self.now[unit.patterns] = bits

    def rows(self, placed: Placed, bits: int) -> Rows:
        """Rows of a weight with a width."""
        packed = placed.packed
        if bits == FULL:
            return _own_rows(packed)
        packed = _repacked(packed, bits, self.plan)
        return ((start, restored(rows)[:, : packed.width]) for start, rows in packed.rows_quantised())


def restore(model: Any, placed: Sequence[Placed], names: Parameters) -> None:
    """Give `model` the checkpoint's weights again where they were rounded."""
    for each in placed:
        put_back(model, each, names, _own_rows(each.packed))


def _own_rows(packed: Packed) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of a weight as the checkpoint has them."""
    with OpenFiles(packed.checkpoint.folder) as files:
        for region in blocks(packed.origin.shape, ROWS_ELEMENTS):
            yield region[0][0], packed.origin.read(region, files).to(torch.float32)


class _Judge:
    """The original's answers to a text, and the distance of a changed model from them."""

    def __init__(self, model: Any, windows: torch.Tensor) -> None:
        self.model, self.windows = model, windows
        self.expected = [self._answers(window) for window in windows]

    def _answers(self, window: torch.Tensor) -> torch.Tensor:
        """log p [L - 1, V] of what follows each token."""
        logits = self.model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        return logits.log_softmax(-1)  # type: ignore[no-any-return]

    def judge(self) -> tuple[float, float]:
        """Mean divergence in nats, and the ratio of perplexities."""
        divergence = worse = 0.0
        count = 0
        for window, expected in zip(self.windows, self.expected, strict=True):
            found, token = self._answers(window), window[1:, None]
            shares = expected.exp()
            divergence += float((shares * (expected - found)).masked_fill_(shares == 0, 0.0).sum())
            worse += float((expected.gather(1, token) - found.gather(1, token)).sum())
            count += len(found)
        return divergence / count, perplexity(worse / count)


def _patterns(placed: Placed) -> tuple[str, ...]:
    """Modules by which a weight is told apart: those of its parameters where it is several or has no module of its
    own, or those of its products, which layers may share.
    """
    if not placed.of_experts and (own := paths(placed.packed.parameters)):
        return own
    alike = len({module.rpartition(".")[2] for module in placed.modules}) == 1  # an embedding and a head are not
    return placed.modules if alike else placed.modules[:1]


def _size(packed: Packed, bits: int, plan: Plan) -> int:
    if bits == FULL:
        return own_bytes(packed)
    return sum(part.size_bytes for part in _repacked(packed, bits, plan).parts)


def own_bytes(packed: Packed) -> int:
    """Bytes of a weight that is not packed."""
    return packed.elements * packed.dtype.bitwidth // 8


def _repacked(packed: Packed, bits: int, plan: Plan) -> Packed:
    """A packed weight with another width. Blocks that divide its rows for one width do for any; where none does, as
    may be with an embedding that is only looked up, they stay as large as they are.
    """
    now = packed.packing
    if now.grid.bits == bits:
        return packed
    other = plan.packed(bits, packed.width) or replace(now, grid=replace(now.grid, bits=bits))
    return replace(packed, packing=other)
