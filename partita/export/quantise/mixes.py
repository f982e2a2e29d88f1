"""A package whose weights have the widths that a budget allows: the search, and what it tries one after the other.

The widths are chosen by what they cost the original model on a text (`quantisation/mixing.py`), which is another than
that on which the quality of the package is measured, where there is enough of it. What is published is what was
measured on the package itself: where that is not good enough, the next wider mix is written.
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
from partita.export.drafts import Draft, Graphs, repacked
from partita.export.progress import Stage, stage
from partita.export.quantise import mixing
from partita.export.quantise.mixing import Ladder
from partita.export.quantise.plan import Plan
from partita.export.quantise.rounding.reference import parameter_names
from partita.export.verify import known_answer, texts
from partita.export.verify.quality import RANDOM, SHORTEST_TEXT, measured_tokens
from partita.export.verify.texts import Text, Tokens
from partita.export.weights import external_data as weights
from partita.export.weights import spilled
from partita.export.work import tell
from partita.observations.text_format import human_bytes
from partita.package.records import Mix, TriedMix, UnitCost
from partita.process import give_back

SHARES = (1.0, 0.5, 0.25)
"""Of the divergence that the ratio stands for: mixes that are written one after the other where the package, with 8-bit
activations and on its own text, is further from the original than the search has seen. After them the widest that may
be is tried.
"""
SAME_TEXT = (
    "{name} has no tokens beyond those that quality is measured on, so widths were chosen on the same text, and its "
    "figures may be a little better than on another"
)


@dataclass(slots=True)
class Mixes:
    """The mixes of one draft, from the smallest that may do to the widest."""

    draft: Draft
    counts: list[int] = field(default_factory=list)
    """Steps of the ladder that are to be tried; the first is the one to write."""
    missed: list[float] = field(default_factory=list)
    """Ratios of those that were written."""
    text: Text | None = None
    unseen: bool = True
    ladder: Ladder | None = None

    def take(self, graphs: Graphs) -> tuple[Graphs, Mix]:
        """The graphs with the widths that are to be tried next, and how they were chosen. The search is made once."""
        work = self.draft.work
        if self.ladder is None:
            size = sum(mixing.own_bytes(each.packed) for each in graphs.packing.placed.values())
            with stage(work.progress, "choose widths", work.seconds, size) as current:
                self.ladder = self._search(graphs, current)
        assert self.draft.plan is not None
        count = self.counts[0]
        made = repacked(graphs, _mixed(self.draft.plan, self.ladder, count))
        # It may be written in another way than the one that was searched on.
        check_size(made, work.options.max_weight_size, "in the way of writing that the target runs")
        return made, self._record(count)

    def widen(self, ratio: float) -> bool:
        """Note that what was written has so large a ratio; False when nothing wider is left to try."""
        self.missed.append(ratio)
        self.counts.pop(0)
        return bool(self.counts)

    def _search(self, graphs: Graphs, current: Stage) -> Ladder:
        """Measure what widths cost, and choose what is to be tried. Raises ResourceError when nothing fits."""
        draft, options, plan = self.draft, self.draft.work.options, self.draft.plan
        assert plan is not None
        check_size(graphs, options.max_weight_size, f"with none wider than {options.precision}")
        self.text, self.unseen = _search_text(draft)
        held = spilled.resident_parameters(draft.checkpoint.tensors, draft.work.scratch)
        beside = 4 * self.text.tokens * draft.fake.vocab_size
        known_answer.check_memory(held, 0, beside, use=f"to choose widths on {self.text.tokens:,} tokens", needed=True)
        placed, folder = tuple(graphs.packing.placed.values()), draft.work.folder
        names = match_names(draft.fake.module, draft.checkpoint.tensors)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-rounded-") as found:
            if draft.text is None:
                model = known_answer.load(draft.checkpoint, draft.work.scratch)
            else:
                with stage(draft.work.progress, "calibrate", draft.work.seconds) as calibrating:
                    model, _ = draft.calibrated(graphs, Path(found), calibrating)
                mixing.restore(model, placed, parameter_names(model, names))
            ladder = mixing.ladder(model, placed, parameter_names(model, names), plan, self.text, current.advance)
            self.counts = self._counts(ladder, _most(ladder, graphs, plan, options.max_weight_size))
            for count in (0, *self.counts):
                ladder.judged(count)
        del model
        give_back()
        return replace(ladder, judge=_out_of_memory)

    def _counts(self, ladder: Ladder, most: int) -> list[int]:
        """Steps that are to be tried: those that bring the divergence down, a wider mix where the next share takes no
        more, and at last `most`, which none goes beyond.
        """
        options = self.draft.work.options
        if options.max_perplexity_ratio is None:
            return [most]
        found: list[int] = []
        for share in SHARES:
            divergence = share * math.log(options.max_perplexity_ratio)
            count = ladder.smallest(divergence, found[-1] if found else 0)
            if count is not None and found and count == found[-1]:
                count += max((most - count) // 2, 1)  # the text says it will do, and the package may be worse than that
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


def _mixed(plan: Plan, ladder: Ladder, count: int) -> Plan:
    """The plan of the mix with so many steps."""
    return replace(plan, keep=(*plan.keep, *ladder.keep(count)))


def _most(ladder: Ladder, graphs: Graphs, plan: Plan, limit: int | None) -> int:
    """The most steps with which the weight file has at most `limit` bytes, with what lies between its tensors."""
    if limit is None:
        return len(ladder.steps)
    count = ladder.largest(limit, _size(graphs), plan) or 0
    while count > 0 and _size(repacked(graphs, _mixed(plan, ladder, count))) > limit:
        count -= 1
    return count


def check_size(graphs: Graphs, most: int | None, how: str) -> None:
    """Raise ResourceError where the weight file takes more than it may. `how`: what its size is of, for the message."""
    if most is not None and _size(graphs) > most:
        takes = f"the weights take {human_bytes(_size(graphs))} {how}"
        raise ResourceError(f"`max_weight_size={human_bytes(most)}`: {takes}; nothing was written")


def _size(graphs: Graphs) -> int:
    """Bytes of the weight file."""
    return weights.file_bytes(item.model for item in graphs.traced)


def _out_of_memory(count: int) -> mixing.Judged:
    """The model of the search is gone by the time that packages are written."""
    raise AssertionError(f"a mix of {count} steps was not measured")


def _search_text(draft: Draft) -> tuple[Text, bool]:
    """What mixes are judged on, and whether it is other text than that of the quality.

    It is what follows that in its file; else the text of the calibration; else the same text, which is told.
    """
    options, vocabulary = draft.work.options, draft.fake.vocab_size
    assert options.quality_text is not None
    path = Path(options.quality_text)
    wanted = max(mixing.FEWEST_TOKENS, min(mixing.MOST_TOKENS, mixing.MOST_LOGITS // vocabulary))
    length = min(mixing.WINDOW_TOKENS, draft.max_length)
    raw, sha256 = texts.read(path, "quality_text")
    found = texts.tokens(raw, draft.checkpoint, vocabulary)
    measured = measured_tokens(options, draft.fake.parameters)
    fewest = min(SHORTEST_TEXT, measured)
    useless = found is not None and texts.says_nothing(found.part(0, measured), fewest)
    if found is None or (useless and "quality-text" not in draft.work.asked):
        ids = np.random.Generator(np.random.PCG64(1)).integers(0, vocabulary, wanted).tolist()
        return Text(RANDOM, hashlib.sha256(b"").hexdigest(), Tokens([], ids).windows(length)), True
    name = path.name
    texts.refuse_useless(found.part(0, measured), fewest, path, "quality_text")
    rest = found.part(measured, measured + wanted)
    if len(rest.ids) >= mixing.FEWEST_TOKENS:
        return Text(f"{name} after what quality is measured on", sha256, rest.windows(length)), True
    if draft.text is not None:
        windows = draft.text.windows[:, :length]
        text = Text(draft.text.name, draft.text.sha256, windows[: max(1, wanted // length)])
        if draft.text.sha256 != sha256:
            return text, True
        tell(draft.work, SAME_TEXT.format(name=name))
        return text, False
    tell(draft.work, SAME_TEXT.format(name=name))
    return Text(name, sha256, found.part(0, wanted).windows(length)), False
