"""Choice of a lowering: probe the target with each until one is fully supported.

A supported lowering may still compute wrong results; it is then rejected, and the next is probed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.errors import UnsupportedModelError
from partita.export.drafts import Draft, Graphs
from partita.export.exporters import Attempts, Exported
from partita.export.progress import stage
from partita.export.target import (
    AUTO,
    ProbeResult,
    Target,
    Way,
    candidates,
    describe,
    every_way,
    instead_of,
    manifest_record,
    rank,
    skeleton,
    usual,
)
from partita.export.trace.attention import GROWING, by_preference
from partita.export.trace.fake_model import FakeModel
from partita.export.trace.operators import CONTRIB
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
from partita.export.trace.tracing import TracedGraph
from partita.package.records import TargetRecord, Verification


@dataclass(slots=True)
class Variants(Attempts):
    """The variants of one draft, in order of preference."""

    draft: Draft
    lowering: str
    """A lowering by name, or auto."""
    write: Callable[[Graphs], Exported]
    """Prepares the graphs of a variant to be written."""
    target: Target | None = None
    """The provider of the package; None where it is not probed."""
    tried: dict[str, Way] = field(default_factory=dict)
    """Label of a variant -> its way."""
    unfit: dict[Way, UnsupportedModelError] = field(default_factory=dict)
    """Variants that the model does not fit."""
    stopped: dict[Way, str] = field(default_factory=dict)
    """Variants that did not open or run -> the error."""

    def best(self) -> Exported | None:
        """The next variant; None when all were tried. Raises UnsupportedModelError when the model fits none."""
        way = self.best_way()
        if way is None:
            return None
        made = self.write(self.draft.graphs(way))
        self.tried[made.label] = way
        return made

    @abstractmethod
    def best_way(self) -> Way | None:
        """The way of the next variant; None when all were tried. Raises UnsupportedModelError."""

    def omitted(self) -> list[str]:
        """The rejected variants with their reasons."""
        return [*reasons_text(self.stopped), *(f"{way}: {error}" for way, error in self.unfit.items())]

    @abstractmethod
    def instead(self, way: Way) -> Variants:
        """The variants with `way` alone."""

    def others(self) -> Sequence[Variants]:
        """The other lowerings, where one was requested."""
        if self.lowering in (AUTO, GROWING):
            return []
        return [self.instead(way) for way in every_way() if way.attention != self.lowering]


@dataclass(slots=True)
class Choosing(Variants):
    """The variants of one draft, and the results of probing the target. `lowering` is used regardless of them."""

    probe_results: dict[Way, ProbeResult] = field(default_factory=dict)
    disagrees: dict[Way, str] = field(default_factory=dict)
    """Variants with wrong results on the target -> detail of the replay."""

    @property
    def asked(self) -> Target:
        """The target."""
        assert self.target is not None
        return self.target

    def best_way(self) -> Way | None:
        """The best remaining variant, after probing until the target supports one completely; None when none is left.

        Raises UnsupportedModelError when the model fits no variant.
        """
        for way in self.ways():
            left = self.remaining()
            if left and self.probe_results[left[0]].unsupported_count == 0 and self.probe_results[left[0]].is_known:
                break
            self.ask(way)
            if way in self.probe_results and (other := self.other_form(way)) is not None:
                self.ask(other)
        if not self.probe_results:
            raise next(iter(self.unfit.values()))
        return next(iter(self.remaining()), None)

    def other_form(self, way: Way) -> Way | None:
        """The same lowering with experts and recurrences in the other form, where it may be better."""
        if self.asked.ask is None:
            return None
        both = self.draft.graphs(way).traced_graphs[-1].has_router or bool(used_by(self.draft.fake.module))
        return instead_of(way, self.probe_results[way], has_both=both)

    def ways(self) -> list[Way]:
        """Variants to probe, including those added because of results."""
        return list(dict.fromkeys([*candidates(self.asked, self.lowering), *self.probe_results]))

    def remaining(self) -> list[Way]:
        """Probed variants that are not rejected, best first."""
        return [way for way in rank(self.probe_results, self.ways()) if way not in {*self.disagrees, *self.stopped}]

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: wrong results, or (`ran` false) it did not open or run."""
        way = self.tried[tried.label]
        if ran:
            self.disagrees[way] = detail
            return
        self.stopped[way] = detail
        self.probe_results[way] = replace(self.probe_results[way], failure=detail)

    def instead(self, way: Way) -> Choosing:
        """The variants with `way` alone, which counts as fully supported."""
        return Choosing(self.draft, way.attention, self.write, self.target, probe_results={way: ProbeResult(0, {}, "")})

    def ask(self, way: Way) -> None:
        """Probe the target with one variant, once."""
        if way in self.probe_results or way in self.unfit:
            return
        work = self.draft.work
        try:
            # The last graph is the decode graph, probed with one token.
            traced = self.draft.graphs(way).traced_graphs[-1]
        except UnsupportedModelError as error:
            self.unfit[way] = error
            return
        if self.asked.ask is None:
            self.probe_results[way] = ProbeResult(len(list(traced.model.graph)), {}, "")
            return
        if not way.is_usual and way.form == "contrib" and not CONTRIB & {node.op_type for node in traced.model.graph}:
            return  # the model's experts and recurrences are in standard operators in both forms
        with stage(work.progress, "probe target", work.seconds, of=str(way)):
            self.probe_results[way] = self.asked.ask(skeleton(traced.model), _one_token(traced))

    def reason(self, taken: Exported) -> str:
        """The reason for the lowering of `taken`, in one sentence."""
        way = self.tried[taken.label]
        head = "requested" if self.lowering != AUTO else AUTO
        if self.asked.ask is None:
            default = f"the default for {self.asked.provider}"
            first = default if not self.stopped else f"the next choice after {default}"
            return "; ".join([f"{head}: {first}, {self.asked.how}", *reasons_text(self.stopped)])
        others = [f"{other} {describe(self.probe_results[other])}" for other in self.remaining() if other != way]
        others += [f"{other} does not match: {detail}" for other, detail in self.disagrees.items()]
        others += [*reasons_text(self.stopped), *(f"{other}: {error}" for other, error in self.unfit.items())]
        return "; ".join([f"{head}: {self.asked.provider} {describe(self.probe_results[way])}", *others])

    def record(self, result: Verification | None) -> TargetRecord:
        """The manifest record. `result`: of the known answer on the target."""
        results = self.probe_results if self.asked.ask is not None else {}
        return TargetRecord(
            provider=self.asked.provider,
            source=self.asked.source,
            how=self.asked.how,
            asked=tuple(manifest_record(way, answer, self.disagrees.get(way, "")) for way, answer in results.items()),
            unfit={str(way): str(error) for way, error in self.unfit.items()},
            verification=result.status if result is not None else "not_run",
            detail=result.detail if result is not None else "",
        )


def _one_token(traced: TracedGraph) -> dict[str, tuple[int, ...]]:
    """Input shapes of a graph for one token."""
    sizes = {TOTAL: traced.spec.max_length + 1}  # a growing cache at its maximum before the step
    ports = {
        port.name: tuple(size if isinstance(size, int) else sizes.get(size, 1) for size in port.shape)
        for port in traced.inputs
    }
    return {**ports, **{state.past: state.shape for state in traced.states}}


def reasons_text(reasons: Mapping[Way, str]) -> list[str]:
    """`way reason` for each, for a sentence."""
    return [f"{way} {reason}" for way, reason in reasons.items()]


@dataclass(slots=True)
class UnprobedChoices(Variants):
    """The variants of one draft without a target to probe, e.g. for the CPU provider."""

    def best_way(self) -> Way | None:
        """The default variant; then, for `auto`, the others that the model fits. None: none is left."""
        first, _ = _without_target(self.lowering, self.draft.fake)
        for way in [first, *(way for way in every_way() if way != first and self.lowering == AUTO)]:
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

    def set_aside(self, tried: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant, with the reason."""
        self.stopped[self.tried[tried.label]] = detail

    def reason(self, taken: Exported) -> str:
        """The reason for the lowering of `taken`, in one sentence."""
        first, why = _without_target(self.lowering, self.draft.fake)
        if self.tried[taken.label] == first:
            return why
        return "; ".join(["auto: the next choice that runs on the CPU provider", *self.omitted()])

    def instead(self, way: Way) -> UnprobedChoices:
        """The variants with the lowering of `way` alone."""
        return UnprobedChoices(self.draft, way.attention, self.write)


def _without_target(wanted: str, fake: FakeModel) -> tuple[Way, str]:
    """The default variant without a target, and the reason."""
    if wanted != AUTO:
        return usual(wanted), "requested"
    best, *others = by_preference()
    fitting = next((each for each in others if not each.same_kv_width), None)
    if best.same_kv_width and fitting and any(layer.key_width != layer.value_width for layer in fake.probed.layers):
        return usual(fitting.name), f"auto: keys and values differ in width, so {best.name} would pad them"
    return usual(best.name), f"auto: {best.merit}, on the CPU provider"
