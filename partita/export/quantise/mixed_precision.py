"""Mixed precision: search for the bits of each weight within a budget, and the attempts that are written.

The search minimises the divergence from the source model on a text (`sensitivity.py`), preferably other text than
that of the quality measurement. The published quality is measured on the package. If it misses the target, the next
larger mix is written.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from partita.errors import ResourceError
from partita.export.checkpoint.naming import match_names
from partita.export.drafts import Draft, Graphs, quantise_again
from partita.export.progress import Stage, stage
from partita.export.quantise import sensitivity
from partita.export.quantise.calibrate.reference import parameter_names
from partita.export.quantise.plan import Plan
from partita.export.quantise.sensitivity import Ladder
from partita.export.verify import known_answer, texts
from partita.export.verify.quality import RANDOM, SHORTEST_TEXT, measured_tokens
from partita.export.verify.texts import Text, Tokens
from partita.export.weights import external_data as weights
from partita.export.weights import memory_map
from partita.export.work import add_note
from partita.observations.text_format import human_bytes
from partita.package.records import Mix, TriedMix, UnitCost
from partita.process import give_back

SHARES = (1.0, 0.5, 0.25)
"""Fractions of the target divergence for successive attempts, as the package may diverge more than the search predicts.

After them the largest allowed mix is tried."""
SAME_TEXT = (
    "{name} has no tokens beyond the part that quality is measured on, so the bits were chosen on the same text; its "
    "quality figures may be slightly better than on other text"
)


@dataclass(slots=True)
class Mixes:
    """The mixes of one draft, from the smallest sufficient one to the largest."""

    draft: Draft
    counts: list[int] = field(default_factory=list)
    """Step counts to try; the first is to be written next."""
    missed: list[float] = field(default_factory=list)
    """Perplexity ratios of the written mixes."""
    text: Text | None = None
    unseen: bool = True
    ladder: Ladder | None = None

    def take(self, graphs: Graphs) -> tuple[Graphs, Mix]:
        """The graphs with the next mix, and a record of its choice. The search runs once."""
        work = self.draft.work
        if self.ladder is None:
            size = sum(sensitivity.own_bytes(each.packed) for each in graphs.packing.placed.values())
            with stage(work.progress, "choose widths", work.seconds, size) as current:
                self.ladder = self._search(graphs, current)
        assert self.draft.plan is not None
        count = self.counts[0]
        made = quantise_again(graphs, _plan_of_mix(self.draft.plan, self.ladder, count))
        # it may be written in another form than the search used
        check_size(made, work.options.max_weight_size, "in the form that the target supports")
        return made, self._record(count)

    def widen(self, ratio: float) -> bool:
        """Record the ratio of the written mix. False when no larger mix is left."""
        self.missed.append(ratio)
        self.counts.pop(0)
        return bool(self.counts)

    def _search(self, graphs: Graphs, current: Stage) -> Ladder:
        """Measure the cost of bits, and set the step counts to try. Raises ResourceError when nothing fits."""
        draft, options, plan = self.draft, self.draft.work.options, self.draft.plan
        assert plan is not None
        check_size(graphs, options.max_weight_size, f"with {options.precision} for all weights")
        self.text, self.unseen = _search_text(draft)
        held = memory_map.resident_parameters(draft.checkpoint.tensors, draft.work.scratch)
        logit_bytes = 4 * self.text.tokens * draft.fake.vocab_size
        known_answer.check_memory(
            held, 0, logit_bytes, use=f"to choose precisions on {self.text.tokens:,} tokens", needed=True
        )
        placed, folder = tuple(graphs.packing.placed.values()), draft.work.folder
        names = match_names(draft.fake.module, draft.checkpoint.tensors)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-rounded-") as found:
            if draft.text is None:
                model = known_answer.load(draft.checkpoint, draft.work.scratch)
            else:
                with stage(draft.work.progress, "calibrate", draft.work.seconds) as calibrating:
                    model, _ = draft.calibrated(graphs, Path(found), calibrating)
                sensitivity.restore(model, placed, parameter_names(model, names))
            ladder = sensitivity.ladder(model, placed, parameter_names(model, names), plan, self.text, current.advance)
            self.counts = self._counts(ladder, _most(ladder, graphs, plan, options.max_weight_size))
            for count in (0, *self.counts):
                ladder.measure_mix(count)
        del model
        give_back()
        return replace(ladder, judge=_out_of_memory)

    def _counts(self, ladder: Ladder, most: int) -> list[int]:
        """Step counts to try: one per share of the target divergence, each larger than its predecessor, then `most`."""
        options = self.draft.work.options
        if options.max_perplexity_ratio is None:
            return [most]
        found: list[int] = []
        for share in SHARES:
            divergence = share * math.log(options.max_perplexity_ratio)
            count = ladder.smallest(divergence, found[-1] if found else 0)
            if count is not None and found and count == found[-1]:
                count += max((most - count) // 2, 1)  # a larger mix, as the package may be worse than predicted
            if count is not None and count <= most:
                found.append(count)
        return found if found and found[-1] == most else [*found, most]

    def _record(self, count: int) -> Mix:
        options, ladder, text = self.draft.work.options, self.ladder, self.text
        assert text is not None and ladder is not None
        return Mix(
            text=text.name,
            text_sha256=text.sha256,
            tokens=text.tokens,
            unseen=self.unseen,
            max_perplexity_ratio=options.max_perplexity_ratio,
            max_weight_size=options.max_weight_size,
            steps=len(ladder.steps),
            taken=count,
            costs=tuple(UnitCost(modules=unit.patterns, kl_mean=cost) for unit, cost in ladder.costs),
            tried=tuple(
                TriedMix(wider=each.steps, kl_mean=each.kl_mean, perplexity_ratio=each.perplexity_ratio)
                for _, each in sorted(ladder.tried.items())
            ),
            missed=tuple(self.missed),
        )


def _plan_of_mix(plan: Plan, ladder: Ladder, count: int) -> Plan:
    """The plan of the mix with `count` steps."""
    return replace(plan, keep=(*plan.keep, *ladder.keep(count)))


def _most(ladder: Ladder, graphs: Graphs, plan: Plan, limit: int | None) -> int:
    """The maximum steps with which the weight file, including padding, has at most `limit` bytes."""
    if limit is None:
        return len(ladder.steps)
    count = ladder.largest(limit, _size(graphs), plan) or 0
    while count > 0 and _size(quantise_again(graphs, _plan_of_mix(plan, ladder, count))) > limit:
        count -= 1
    return count


def check_size(graphs: Graphs, most: int | None, how: str) -> None:
    """Raise ResourceError where the weight file exceeds `most` bytes. `how`: a phrase for the message."""
    if most is not None and _size(graphs) > most:
        takes = f"the weights take {human_bytes(_size(graphs))} {how}"
        raise ResourceError(f"`max_weight_size={human_bytes(most)}`: {takes}; nothing was written")


def _size(graphs: Graphs) -> int:
    """Size of the weight file in bytes."""
    return weights.file_bytes(item.model for item in graphs.traced_graphs)


def _out_of_memory(count: int) -> sensitivity.MixDivergence:
    """Fails: the search model is released before packages are written."""
    raise AssertionError(f"a mix of {count} steps was not measured")


def _search_text(draft: Draft) -> tuple[Text, bool]:
    """The text of the search, and whether it differs from the text of the quality measurement.

    It is the rest of that file; else the calibration text; else the same text.
    """
    options, vocabulary = draft.work.options, draft.fake.vocab_size
    assert options.quality_text is not None
    path = Path(options.quality_text)
    wanted = max(sensitivity.FEWEST_TOKENS, min(sensitivity.MOST_TOKENS, sensitivity.MOST_LOGITS // vocabulary))
    length = min(sensitivity.WINDOW_TOKENS, draft.max_length)
    raw, sha256 = texts.read(path, "quality_text")
    found = texts.tokens(raw, draft.checkpoint, vocabulary)
    measured = measured_tokens(options, draft.fake.parameters)
    fewest = min(SHORTEST_TEXT, measured)
    useless = found is not None and texts.is_useless(found.part(0, measured), fewest)
    if found is None or (useless and "quality-text" not in draft.work.asked):
        ids = np.random.Generator(np.random.PCG64(1)).integers(0, vocabulary, wanted).tolist()
        return Text(RANDOM, hashlib.sha256(b"").hexdigest(), Tokens([], ids).windows(length)), True
    name = path.name
    texts.refuse_useless(found.part(0, measured), fewest, path, "quality_text")
    rest = found.part(measured, measured + wanted)
    if len(rest.ids) >= sensitivity.FEWEST_TOKENS:
        return Text(f"{name} after the part that quality is measured on", sha256, rest.windows(length)), True
    if draft.text is not None:
        windows = draft.text.windows[:, :length]
        text = Text(draft.text.name, draft.text.sha256, windows[: max(1, wanted // length)])
        if draft.text.sha256 != sha256:
            return text, True
        add_note(draft.work, SAME_TEXT.format(name=name))
        return text, False
    add_note(draft.work, SAME_TEXT.format(name=name))
    return Text(name, sha256, found.part(0, wanted).windows(length)), False
