"""Mixed precision: search for the bits of each weight within a budget. The result is a list of `--keep` settings.

The divergence from the source model, the mean of log (p / q) over p, is measured with each weight quantised alone.
Weights are ordered by the divergence that more bits save per byte: first to eight bits, then to the activation dtype.
The mixes are the prefixes of that order, each measured with all weights quantised.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from partita.dtypes import PRECISIONS, dtype_numbered
from partita.errors import ResourceError
from partita.export.drafts import Graphs, quantise_again
from partita.export.progress import Stage, stage
from partita.export.quantise import Keep, paths
from partita.export.quantise.plan import Plan
from partita.export.quantise.reference import Parameters, parameter_names, put_back, untie
from partita.export.quantise.rewrite import PlacedWeight
from partita.export.quantise.weight_source import QuantisedSource
from partita.export.trace.fake_model import quiet, translate_errors
from partita.export.verify import known_answer
from partita.export.verify.quality import measured_tokens, perplexity
from partita.export.verify.texts import Text, read_windows
from partita.export.weights import memory_map
from partita.export.weights.sources import WeightSource
from partita.observations.text_format import human_bytes
from partita.package.records import MeasuredMix, Mix, UnitCost
from partita.process import give_back

FULL = 32
"""Bits of an unquantised weight."""
MOST_UNITS = 64
"""With more weights than this, weights at the same place of several layers form one unit."""
MOST_TOKENS, FEWEST_TOKENS, WINDOW_TOKENS = 2048, 256, 256
MOST_LOGITS = 1 << 27
"""Maximum number of stored logits of the source model, 4 bytes each."""
AIM = 0.75
"""Fraction of the allowed divergence: the package also rounds activations, and is measured on other text."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that share one number of bits."""

    placed: tuple[PlacedWeight, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Module names for `--keep`."""
        return tuple(dict.fromkeys(pattern for each in self.placed for pattern in _patterns(each)))

    def keep(self, bits: int) -> tuple[Keep, ...]:
        """The settings that give its weights `bits`; unquantised, that holds for all uses of a shared weight."""
        if bits != FULL:
            return tuple(Keep(name, f"int{bits}") for name in self.patterns)
        dtype = dtype_numbered(int(self.placed[0].packed.dtype)).name
        precision = next(name for name, each in PRECISIONS.items() if each.bits is None and each.dtype == dtype)
        readers = (module for each in self.placed for module in each.modules)
        return tuple(Keep(name, precision) for name in dict.fromkeys([*self.patterns, *readers]))

    def size(self, bits: int, plan: Plan) -> int:
        """Size in the package in bytes."""
        return sum(part.size_bytes for each in self.placed for part in _with_bits(each.packed, bits, plan).parts)


Step = tuple[Unit, int]
"""A unit, and its higher bits."""


class Mixes:
    """All mixes of a package, each a prefix of `steps`, and their divergence from the source model on a text."""

    def __init__(
        self, model: Any, placed: Sequence[PlacedWeight], names: Parameters, plan: Plan, text: Text, progress: Stage
    ) -> None:
        self.model, self.names, self.plan, self.windows = model, names, plan, torch.from_numpy(text.windows)
        self.bits: dict[tuple[str, ...], int] = {}
        self.tried: dict[int, MeasuredMix] = {}
        found = units(placed, plan)
        untie(model, placed, names)
        self.expected = [self._log_probabilities(window) for window in self.windows]
        free = {each.packed.key for unit in found for each in unit.placed}
        for each in placed:
            if each.packed.key not in free:
                put_back(model, each, names, each.packed.rows_restored())
        floor, costs = self._divergence()[0], []
        for unit in found:
            self._set(unit, plan.bits)
            costs.append((unit, max(0.0, self._divergence()[0] - floor)))
            self._set(unit, FULL)
            progress.advance(unit.size(FULL, plan))
        self.costs = sorted(costs, key=lambda pair: -pair[1])
        """Divergence with one unit quantised alone, the largest first."""
        self.steps = ordered_steps(costs, plan)

    def measure(self, count: int) -> MeasuredMix:
        """The measurement of the mix with `count` steps, cached."""
        if count not in self.tried:
            bits = {unit.patterns: more for unit, more in self.steps[:count]}
            for unit, _ in self.costs:
                self._set(unit, bits.get(unit.patterns, self.plan.bits))
            kl_mean, ratio = self._divergence()
            self.tried[count] = MeasuredMix(applied_steps=count, kl_mean=kl_mean, perplexity_ratio=ratio)
        return self.tried[count]

    def smallest(self, divergence: float, most: int) -> int:
        """The fewest steps that reach the divergence, at most `most`: a binary search, as if every step reduced it."""
        return bisect_left(range(most), True, key=lambda count: self.measure(count).kl_mean <= divergence)

    def _set(self, unit: Unit, bits: int) -> None:
        if self.bits.get(unit.patterns, FULL) != bits:
            self.bits[unit.patterns] = bits
            for each in unit.placed:
                put_back(self.model, each, self.names, _with_bits(each.packed, bits, self.plan).rows_restored())

    def _divergence(self) -> tuple[float, float]:
        """Mean divergence in nats, and the perplexity ratio."""
        divergence = worse = 0.0
        for window, expected in zip(self.windows, self.expected, strict=True):
            found, token, shares = self._log_probabilities(window), window[1:, None], expected.exp()
            divergence += float((shares * (expected - found)).masked_fill_(shares == 0, 0.0).sum(-1).mean())
            worse += float((expected.gather(1, token) - found.gather(1, token)).mean())
        return divergence / len(self.windows), perplexity(worse / len(self.windows))

    def _log_probabilities(self, window: torch.Tensor) -> torch.Tensor:
        """log p [L - 1, V] of the next token at each position."""
        logits: torch.Tensor = self.model(input_ids=window[None, :-1], use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


def search(graphs: Graphs) -> tuple[tuple[Keep, ...], Mix]:
    """The settings of the mix within the budget, and a record. Raises ResourceError when nothing fits."""
    draft, plan, work = graphs.draft, graphs.draft.plan, graphs.draft.work
    options = work.options
    assert plan is not None and options.quality_text is not None
    check_size(graphs, options.max_weight_size, f"with {options.precision} for all weights")
    path, measured = Path(options.quality_text), measured_tokens(options, draft.fake.parameters)
    count = max(FEWEST_TOKENS, min(MOST_TOKENS, MOST_LOGITS // draft.fake.vocab_size))
    sizes = draft.fake.vocab_size, min(WINDOW_TOKENS, draft.max_length), count, min(FEWEST_TOKENS, measured)
    chosen = "quality-text" in work.recorded_options
    text = read_windows(path, "quality_text", draft.checkpoint, *sizes, after=measured, chosen=chosen, seed=1)
    held = memory_map.resident_parameters(draft.checkpoint.tensors, work.scratch)
    logit_bytes = 4 * text.tokens * draft.fake.vocab_size
    known_answer.check_memory(held, 0, logit_bytes, use=f"to choose precisions on {text.tokens:,} tokens", needed=True)
    placed = tuple(graphs.packing.placed.values())

    def size_with(count: int) -> int:
        return quantise_again(graphs, keep_of(steps[:count])).file_bytes

    with stage(work.progress, "choose widths", work.seconds, Unit(placed).size(FULL, plan)) as current:
        model = known_answer.load(draft.checkpoint, work.scratch)
        names = parameter_names(model, draft.sources)
        with torch.no_grad(), quiet(), translate_errors("running the source model"):
            mixes = Mixes(model, placed, names, plan, text, current)
            steps, applied = mixes.steps, len(mixes.steps)
            if options.max_weight_size is not None:
                applied = bisect_right(range(1, applied + 1), options.max_weight_size, key=size_with)
            if options.max_perplexity_ratio is not None:
                applied = mixes.smallest(AIM * math.log(options.max_perplexity_ratio), applied)
            for steps_used in (0, applied):
                mixes.measure(steps_used)
    record = Mix(
        text=text.name,
        text_sha256=text.sha256,
        tokens=text.tokens,
        held_out=text.name != path.name,  # the rest of the file, or random tokens
        max_perplexity_ratio=options.max_perplexity_ratio,
        max_weight_size=options.max_weight_size,
        steps=len(steps),
        applied_steps=applied,
        costs=tuple(UnitCost(modules=unit.patterns, kl_mean=cost) for unit, cost in mixes.costs),
        measured=tuple(tried for _, tried in sorted(mixes.tried.items())),
    )
    del model, mixes
    give_back()
    return keep_of(steps[:applied]), record


def units(placed: Sequence[PlacedWeight], plan: Plan) -> list[Unit]:
    """The units that may get more bits: those with the bits of the package and without a `--keep` setting."""
    already_set = {
        _patterns(each) for each in placed if plan.setting((*_patterns(each), *paths(each.packed.parameters)))
    }
    free = [
        each for each in placed if each.packed.packing.grid.bits == plan.bits and _patterns(each) not in already_set
    ]
    for layers in range(1, max(2, len(free) + 1)):  # of which weights at the same place form one unit
        groups: dict[tuple[str, int], list[PlacedWeight]] = {}
        for each in free:
            parts = _patterns(each)[0].split(".")
            number = next((int(part) for part in parts if part.isdigit()), 0)
            role = ".".join("*" if part.isdigit() else part for part in parts)  # experts share their bits
            groups.setdefault((role, number // layers), []).append(each)
        if len(groups) <= MOST_UNITS:
            break
    return [Unit(tuple(group)) for group in groups.values()]


def ordered_steps(costs: Sequence[tuple[Unit, float]], plan: Plan) -> tuple[Step, ...]:
    """Steps of all units: first to the next bits, then to the bits after it, by saved divergence per byte."""
    steps: list[Step] = []
    for before, after in pairwise(dict.fromkeys(bits for bits in (plan.bits, 8, FULL) if bits >= plan.bits)):
        worth = [(cost / max(1, unit.size(after, plan) - unit.size(before, plan)), unit) for unit, cost in costs]
        steps += [(unit, after) for _, unit in sorted(worth, key=lambda pair: -pair[0])]
    return tuple(steps)


def keep_of(steps: Sequence[Step]) -> tuple[Keep, ...]:
    """The `--keep` settings of a mix."""
    last = {unit.patterns: (unit, bits) for unit, bits in steps}
    return tuple(keep for unit, bits in last.values() for keep in unit.keep(bits))


def check_size(graphs: Graphs, most: int | None, how: str) -> None:
    """Raise ResourceError where the weight file exceeds `most` bytes. `how`: a phrase for the message."""
    if most is not None and (size := graphs.file_bytes) > most:
        takes = f"the weights take {human_bytes(size)} {how}"
        raise ResourceError(f"`max_weight_size={human_bytes(most)}`: {takes}; nothing was written")


def _patterns(placed: PlacedWeight) -> tuple[str, ...]:
    """The module names that identify a weight: of its parameters for joined weights, else of its products."""
    if not placed.of_experts and (own := paths(placed.packed.parameters)):
        return own
    alike = len({module.rpartition(".")[2] for module in placed.modules}) == 1  # an embedding and a head are not alike
    return placed.modules if alike else placed.modules[:1]


def _with_bits(packed: QuantisedSource, bits: int, plan: Plan) -> WeightSource:
    """A quantised weight with other bits."""
    now = packed.packing
    if bits == FULL or now.grid.bits == bits:
        return packed.floats if bits == FULL else packed
    # no block size divides the rows of an embedding: it stays
    return replace(packed, packing=plan.packed(bits, packed.width) or replace(now, grid=replace(now.grid, bits=bits)))
