"""In which way a model is written: the target is asked about one after the other, until it takes one whole.

What it takes it may still compute wrongly. Such a way is set aside, and the next one is asked about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from partita.errors import UnsupportedModelError
from partita.export.drafts import Draft
from partita.export.progress import stage
from partita.export.target import Answer, Target, asked, candidates, describe, instead_of, rank, skeleton
from partita.export.trace.attention import ranked
from partita.export.trace.fake_model import FakeModel
from partita.export.trace.operators import CONTRIB
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
from partita.export.trace.tracing import Traced
from partita.export.ways import AUTO, Way, every_way, usual
from partita.package.records import TargetRecord, Verification


class Choices(Protocol):
    """Which way is tried next, and what is said of the one that is taken."""

    @property
    def target(self) -> Target | None:
        """The provider that the package is for; None when nobody is asked."""

    @property
    def wanted(self) -> str:
        """A lowering by name, or auto."""

    def best(self) -> Way | None:
        """The way to try next; None when all were tried. Raises UnsupportedModelError when the model fits none."""

    def set_aside(self, way: Way, detail: str, *, ran: bool) -> None:
        """Do not try a way again: it does not run, or it `ran` and computed something else."""

    def left_out(self) -> list[str]:
        """Every way that was not taken, with its reason."""

    def reason(self, way: Way) -> str:
        """Why it is `way`, in one sentence."""

    def record(self, result: Verification | None) -> TargetRecord:
        """What the manifest keeps of the target. `result`: of the known answer on it."""

    def instead(self, way: Way) -> Choices:
        """Choices among which `way` is the only one."""


@dataclass(slots=True)
class Choosing:
    """Ways to write one draft, and what the target said of each."""

    draft: Draft
    target: Target
    wanted: str
    """A lowering by name, which is taken whatever the answer, or auto."""
    answers: dict[Way, Answer] = field(default_factory=dict)
    unfit: dict[Way, UnsupportedModelError] = field(default_factory=dict)
    """Ways that the model does not fit."""
    disagrees: dict[Way, str] = field(default_factory=dict)
    """Ways that the target takes and computes wrongly, and what the replay said."""
    stopped: dict[Way, str] = field(default_factory=dict)
    """Ways that did not open or run, and what was said."""

    def best(self) -> Way | None:
        """The best way that is not ruled out, after asking the target until one leaves no node; None when none is left.

        Raises UnsupportedModelError when the model fits no way.
        """
        for way in self.ways():
            left = self.left()
            if left and self.answers[left[0]].misses == 0 and self.answers[left[0]].is_known:
                break
            self.ask(way)
            if way in self.answers and (other := self.other_form(way)) is not None:
                self.ask(other)
        if not self.answers:
            raise next(iter(self.unfit.values()))
        return next(iter(self.left()), None)

    def other_form(self, way: Way) -> Way | None:
        """The same lowering with experts and recurrences in the other form, where asking about that may tell more."""
        if self.target.ask is None:
            return None
        both = self.draft.graphs(way).traced[-1].routed or bool(used_by(self.draft.fake.module))
        return instead_of(way, self.answers[way], has_both=both)

    def ways(self) -> list[Way]:
        """Ways to ask about, and those that an answer has led to."""
        return list(dict.fromkeys([*candidates(self.target, self.wanted), *self.answers]))

    def left(self) -> list[Way]:
        """Ways with an answer that are still to be tried, best first."""
        return [way for way in rank(self.answers, self.ways()) if way not in {*self.disagrees, *self.stopped}]

    def set_aside(self, way: Way, detail: str, *, ran: bool) -> None:
        """Rule out a way: it disagrees with the model, or (`ran` false) it did not open or run."""
        if ran:
            self.disagrees[way] = detail
            return
        self.stopped[way] = detail
        self.answers[way] = replace(self.answers[way], fails=detail)

    def left_out(self) -> list[str]:
        """Every way that was not taken, with its reason."""
        return [*told(self.stopped), *told({way: str(error) for way, error in self.unfit.items()})]

    def instead(self, way: Way) -> Choosing:
        """Choices with `way` alone, which counts as accepted by the target."""
        return Choosing(self.draft, self.target, way.attention, {way: Answer(0, {}, "")})

    def ask(self, way: Way) -> None:
        """Ask the target about one way, once."""
        if way in self.answers or way in self.unfit:
            return
        work = self.draft.work
        try:
            # The last graph is the one for decode; a step of one token is what is asked about.
            traced = self.draft.graphs(way).traced[-1]
        except UnsupportedModelError as error:
            self.unfit[way] = error
            return
        if self.target.ask is None:
            self.answers[way] = Answer(len(list(traced.model.graph)), {}, "")
            return
        if not way.is_usual and way.form == "contrib" and not CONTRIB & {node.op_type for node in traced.model.graph}:
            return  # this model's are written in standard operators in both forms
        with stage(work.progress, "ask target", work.seconds, of=str(way)):
            self.answers[way] = self.target.ask(skeleton(traced.model), _one_token(traced))

    def reason(self, way: Way) -> str:
        """Why it is `way`, in one sentence."""
        head = "asked for" if self.wanted != AUTO else AUTO
        if self.target.ask is None:
            default = f"the default for {self.target.provider}"
            first = default if not self.stopped else f"the next after {default}"
            return "; ".join([f"{head}: {first}, {self.target.how}", *told(self.stopped)])
        others = [f"{other} {describe(self.answers[other])}" for other in self.left() if other != way]
        others += [f"{other} disagrees: {detail}" for other, detail in self.disagrees.items()]
        others += [*told(self.stopped), *(f"{other}: {error}" for other, error in self.unfit.items())]
        return "; ".join([f"{head}: {self.target.provider} {describe(self.answers[way])}", *others])

    def record(self, result: Verification | None) -> TargetRecord:
        """What the manifest keeps. `result`: of the known answer on the target."""
        told = self.answers if self.target.ask is not None else {}
        return TargetRecord(
            provider=self.target.provider,
            source=self.target.source,
            how=self.target.how,
            asked=tuple(asked(way, answer, self.disagrees.get(way, "")) for way, answer in told.items()),
            unfit={str(way): str(error) for way, error in self.unfit.items()},
            verification=result.status if result is not None else "not_run",
            detail=result.detail if result is not None else "",
        )


def _one_token(traced: Traced) -> dict[str, tuple[int, ...]]:
    """Sizes of the inputs of a graph that reads one token."""
    sizes = {TOTAL: traced.spec.max_length + 1}  # a cache that grows, and has its most rows before the step
    ports = {
        port.name: tuple(size if isinstance(size, int) else sizes.get(size, 1) for size in port.shape)
        for port in traced.inputs
    }
    return {**ports, **{state.past: state.shape for state in traced.states}}


def told(reasons: Mapping[Way, str]) -> list[str]:
    """Ways and their reasons, for a sentence."""
    return [f"{way} {reason}" for way, reason in reasons.items()]


@dataclass(slots=True)
class Unasked:
    """Ways to write one draft where there is no target to ask: as on the CPU provider."""

    draft: Draft
    wanted: str
    unfit: dict[Way, UnsupportedModelError] = field(default_factory=dict)
    stopped: dict[Way, str] = field(default_factory=dict)
    target: None = None

    def best(self) -> Way | None:
        """The default way, then, for `auto`, the others that the model fits. None: no way is left."""
        first, _ = _without_target(self.wanted, self.draft.fake)
        for way in [first, *(way for way in every_way() if way != first and self.wanted == AUTO)]:
            if way in self.stopped or way in self.unfit:
                continue
            try:
                self.draft.graphs(way)
            except UnsupportedModelError as error:
                if not self.stopped:
                    raise
                self.unfit[way] = error
            else:
                return way
        return None

    def set_aside(self, way: Way, detail: str, *, ran: bool) -> None:
        """Rule out a way, with what was said of it."""
        self.stopped[way] = detail

    def left_out(self) -> list[str]:
        """Every way that was not taken, with its reason."""
        return [*told(self.stopped), *(f"{way}: {error}" for way, error in self.unfit.items())]

    def reason(self, way: Way) -> str:
        """Why it is `way`, in one sentence."""
        first, why = _without_target(self.wanted, self.draft.fake)
        return why if way == first else "; ".join(["auto: the next that runs on the CPU provider", *self.left_out()])

    def record(self, result: Verification | None) -> TargetRecord:
        """Never asked for: there is no target."""
        raise NotImplementedError

    def instead(self, way: Way) -> Unasked:
        """Choices with the lowering of `way` alone."""
        return Unasked(self.draft, way.attention)


def _without_target(wanted: str, fake: FakeModel) -> tuple[Way, str]:
    """The way where nobody is to be asked, and why."""
    if wanted != AUTO:
        return usual(wanted), "asked for"
    best, *others = ranked()
    fitting = next((each for each in others if not each.same_kv_width), None)
    if best.same_kv_width and fitting and any(layer.key_width != layer.value_width for layer in fake.probed.layers):
        return usual(fitting.name), f"auto: keys and values differ in width, which {best.name} would pad"
    return usual(best.name), f"auto: {best.merit}, on the CPU provider"
