"""Which lowering a package gets: the target is asked about one after the other, until it takes one whole.

What it takes it may still compute wrongly. Such a lowering is set aside, and the next one is asked about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from partita.errors import UnsupportedModelError
from partita.export.attention import lowering
from partita.export.drafts import Draft
from partita.export.fake_model import FakeModel
from partita.export.progress import stage
from partita.export.target import ORDER, Answer, Target, asked, candidates, describe, rank, skeleton
from partita.export.tracing import Traced
from partita.package import TargetRecord, Verification


class Choices(Protocol):
    """Which lowering is tried next, and what is said of the one that is taken."""

    @property
    def target(self) -> Target | None:
        """The provider that the package is for; None when nobody is asked."""

    @property
    def wanted(self) -> str:
        """A lowering by name, or auto."""

    def best(self) -> str | None:
        """The lowering to try next; None when all were tried. Raises UnsupportedModelError when the model fits none."""

    def set_aside(self, name: str, detail: str, *, ran: bool) -> None:
        """Do not try a lowering again: it does not run, or it `ran` and computed something else."""

    def left_out(self) -> list[str]:
        """Every lowering that was not taken, with its reason."""

    def reason(self, name: str) -> str:
        """Why it is `name`, in one sentence."""

    def record(self, result: Verification | None) -> TargetRecord:
        """What the manifest keeps of the target. `result`: of the known answer on it."""

    def instead(self, name: str) -> Choices:
        """The same for the lowering `name`."""


@dataclass(slots=True)
class Choosing:
    """Lowerings of one draft, and what the target said of each."""

    draft: Draft
    target: Target
    wanted: str
    """A lowering by name, which is taken whatever the answer, or auto."""
    answers: dict[str, Answer] = field(default_factory=dict)
    unfit: dict[str, UnsupportedModelError] = field(default_factory=dict)
    """Lowerings that the model does not fit."""
    disagrees: dict[str, str] = field(default_factory=dict)
    """Lowerings that the target takes and computes wrongly, and what the replay said."""
    stopped: dict[str, str] = field(default_factory=dict)
    """Lowerings that did not open or run, and what was said."""

    def best(self) -> str | None:
        """The lowering to try next."""
        names = candidates(self.target, self.wanted)
        for name in names:
            left = self.left()
            if left and self.answers[left[0]].misses == 0:
                break
            if name not in self.answers and name not in self.unfit:
                self.ask(name)
        if not self.answers:
            raise next(iter(self.unfit.values()))
        return next(iter(self.left()), None)

    def left(self) -> list[str]:
        """Lowerings with an answer that are still to be tried, best first."""
        names = candidates(self.target, self.wanted)
        return [name for name in rank(self.answers, names) if name not in {*self.disagrees, *self.stopped}]

    def set_aside(self, name: str, detail: str, *, ran: bool) -> None:
        """Do not try a lowering again."""
        if ran:
            self.disagrees[name] = detail
            return
        self.stopped[name] = detail
        self.answers[name] = replace(self.answers[name], fails=detail)

    def left_out(self) -> list[str]:
        """Every lowering that was not taken, with its reason."""
        return [*told(self.stopped), *told({name: str(error) for name, error in self.unfit.items()})]

    def instead(self, name: str) -> Choosing:
        """The same for the lowering `name`."""
        return Choosing(self.draft, self.target, name, {name: Answer(0, {}, "")})

    def ask(self, name: str) -> None:
        """Ask the target about one lowering."""
        work = self.draft.work
        try:
            # The last graph is the one for decode; a step of one token is what is asked about.
            traced = self.draft.graphs(name).traced[-1]
        except UnsupportedModelError as error:
            self.unfit[name] = error
            return
        if self.target.ask is None:
            self.answers[name] = Answer(len(list(traced.model.graph)), {}, "")
            return
        with stage(work.progress, "ask target", work.seconds, of=name):
            self.answers[name] = self.target.ask(skeleton(traced.model), one_token(traced))

    def reason(self, name: str) -> str:
        """Why it is `name`, in one sentence."""
        head = "asked for" if self.wanted != "auto" else "auto"
        if self.target.ask is None:
            default = f"the default for {self.target.provider}"
            first = default if not self.stopped else f"the next after {default}"
            return "; ".join([f"{head}: {first}, {self.target.how}", *told(self.stopped)])
        others = [f"{other} {describe(self.answers[other])}" for other in self.left() if other != name]
        others += [f"{other} disagrees: {detail}" for other, detail in self.disagrees.items()]
        others += [*told(self.stopped), *(f"{other}: {error}" for other, error in self.unfit.items())]
        return "; ".join([f"{head}: {self.target.provider} {describe(self.answers[name])}", *others])

    def record(self, result: Verification | None) -> TargetRecord:
        """What the manifest keeps. `result`: of the known answer on the target."""
        told = self.answers if self.target.ask is not None else {}
        return TargetRecord(
            provider=self.target.provider,
            source=self.target.source,
            how=self.target.how,
            asked=tuple(asked(name, answer, self.disagrees.get(name, "")) for name, answer in told.items()),
            unfit={name: str(error) for name, error in self.unfit.items()},
            verification=result.status if result is not None else "not_run",
            detail=result.detail if result is not None else "",
        )


def one_token(traced: Traced) -> dict[str, tuple[int, ...]]:
    """Sizes of the inputs of a graph that reads one token."""
    ports = {port.name: tuple(size if isinstance(size, int) else 1 for size in port.shape) for port in traced.inputs}
    return {**ports, **{state.past: state.shape for state in traced.states}}


def told(reasons: Mapping[str, str]) -> list[str]:
    """Lowerings and their reasons, for a sentence."""
    return [f"{name} {reason}" for name, reason in reasons.items()]


@dataclass(slots=True)
class Unasked:
    """Lowerings of one draft where there is no target to ask: as on the CPU provider."""

    draft: Draft
    wanted: str
    unfit: dict[str, UnsupportedModelError] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    target: None = None

    def best(self) -> str | None:
        """The lowering to try next."""
        first, _ = without_target(self.wanted, self.draft.fake)
        names = [first, *(name for name in ORDER if name != first and self.wanted == "auto")]
        for name in names:
            if name in self.stopped or name in self.unfit:
                continue
            try:
                self.draft.graphs(name)
            except UnsupportedModelError as error:
                if not self.stopped:
                    raise
                self.unfit[name] = error
            else:
                return name
        return None

    def set_aside(self, name: str, detail: str, *, ran: bool) -> None:
        """Do not try a lowering again."""
        self.stopped[name] = detail

    def left_out(self) -> list[str]:
        """Every lowering that was not taken, with its reason."""
        return [*told(self.stopped), *(f"{name}: {error}" for name, error in self.unfit.items())]

    def reason(self, name: str) -> str:
        """Why it is `name`, in one sentence."""
        first, why = without_target(self.wanted, self.draft.fake)
        return why if name == first else "; ".join(["auto: the next that runs on the CPU provider", *self.left_out()])

    def record(self, result: Verification | None) -> TargetRecord:
        """Never asked for: there is no target."""
        raise NotImplementedError

    def instead(self, name: str) -> Unasked:
        """The same for the lowering `name`."""
        return Unasked(self.draft, name)


def without_target(wanted: str, fake: FakeModel) -> tuple[str, str]:
    """The lowering where nobody is to be asked, and why."""
    if wanted != "auto":
        return lowering(wanted).name, "asked for"
    if any(layer.key_width != layer.value_width for layer in fake.probed.layers):
        return "onnx24", "auto: keys and values differ in width, which gqa would pad"
    return "gqa", "auto: one fused node per layer, in place, on the CPU provider"
