"""Choice of a lowering: probe the target with each until one is fully supported.

A supported lowering may still compute wrong results; it is then rejected, and the next is probed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from partita.errors import UnsupportedModelError
from partita.export.drafts import Draft, Graphs
from partita.export.exporters import Attempts, Exported
from partita.export.progress import stage
from partita.export.target import (
    AUTO,
    GraphVariant,
    ProbeResult,
    Target,
    candidates,
    describe,
    every_variant,
    instead_of,
    manifest_record,
    rank,
    skeleton,
    target_record,
    usual,
)
from partita.export.trace import CONTRIB
from partita.export.trace.attention import GROWING, by_preference
from partita.export.trace.fake_model import FakeModel
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
from partita.export.trace.tracing import TracedGraph
from partita.package.records import TargetRecord, Verification


@dataclass(slots=True)
class Variants(Attempts):
    """The variants of one draft in order of preference, and the results of probing its target."""

    draft: Draft
    lowering: str
    """A lowering by name, which is used regardless of the results, or auto."""
    write: Callable[[Graphs], Exported]
    """Prepares the graphs of a variant to be written."""
    target: Target | None = None
    """The provider of the package; None where it is not probed."""
    probe_results: dict[GraphVariant, ProbeResult] = field(default_factory=dict)
    by_label: dict[str, GraphVariant] = field(default_factory=dict)
    """Label of a variant -> its way."""
    misfits: dict[GraphVariant, UnsupportedModelError] = field(default_factory=dict)
    """Variants that the model does not fit."""
    failures: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants that did not open or run -> the error."""
    mismatches: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants with wrong results on the target -> detail of the replay."""

    def best(self) -> Exported | None:
        """The next variant; None when all were tried. Raises UnsupportedModelError when the model fits none."""
        way = self._default() if self.target is None else self._best_for(self.target)
        if way is None:
            return None
        exported = self.write(self.draft.graphs(way))
        self.by_label[exported.label] = way
        return exported

    def _default(self) -> GraphVariant | None:
        """The default variant; then, for `auto`, the others that the model fits."""
        first, _ = _without_target(self.lowering, self.draft.fake)
        for way in [first, *(way for way in every_variant() if way != first and self.lowering == AUTO)]:
            if way in self.failures or way in self.misfits:
                continue
            try:
                self.draft.graphs(way)
            except UnsupportedModelError as error:
                if not self.failures:
                    raise
                self.misfits[way] = error
            else:
                return way
        return None

    def _best_for(self, target: Target) -> GraphVariant | None:
        """The best remaining variant, after probing until the target supports one completely."""
        for way in dict.fromkeys([*candidates(target, self.lowering), *self.probe_results]):
            ranked = self.ranked(target)
            if (
                ranked
                and self.probe_results[ranked[0]].unsupported_count == 0
                and self.probe_results[ranked[0]].is_known
            ):
                break
            self._probe(target, way)
            if way in self.probe_results and target.ask is not None:
                # the same lowering with experts and recurrences in the other form, where it may be better
                routed = self.draft.graphs(way).traced_graphs[-1].has_router
                both = routed or bool(used_by(self.draft.fake.module))
                other = instead_of(way, self.probe_results[way], has_both=both)
                if other is not None:
                    self._probe(target, other)
        if not self.probe_results:
            raise next(iter(self.misfits.values()))
        return next(iter(self.ranked(target)), None)

    def ranked(self, target: Target) -> list[GraphVariant]:
        """Probed variants that are not rejected, best first."""
        order = list(dict.fromkeys([*candidates(target, self.lowering), *self.probe_results]))
        return [way for way in rank(self.probe_results, order) if way not in {*self.mismatches, *self.failures}]

    def reject(self, exported: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: wrong results, or (`ran` false) it did not open or run."""
        way = self.by_label[exported.label]
        if ran and self.target is not None:
            self.mismatches[way] = detail
            return
        self.failures[way] = detail
        if way in self.probe_results:
            self.probe_results[way] = replace(self.probe_results[way], failure=detail)

    def rejections(self) -> list[str]:
        """The rejected variants with their reasons."""
        reasons: dict[GraphVariant, object] = {**self.failures, **self.misfits}
        return [f"{way} {self.failures[way]}" if way in self.failures else f"{way}: {reasons[way]}" for way in reasons]

    def alternatives(self) -> Sequence[Variants]:
        """The other lowerings, where one was requested; each counts as fully supported."""
        if self.lowering in (AUTO, GROWING):
            return []
        supported = ProbeResult(0, {}, "")
        return [
            Variants(self.draft, way.attention, self.write, self.target, {way: supported})
            for way in every_variant()
            if way.attention != self.lowering
        ]

    def _probe(self, target: Target, way: GraphVariant) -> None:
        """Probe the target with one variant, once."""
        if way in self.probe_results or way in self.misfits:
            return
        work = self.draft.work
        try:
            # The last graph is the decode graph, probed with one token.
            traced = self.draft.graphs(way).traced_graphs[-1]
        except UnsupportedModelError as error:
            self.misfits[way] = error
            return
        if target.ask is None:
            self.probe_results[way] = ProbeResult(len(list(traced.model.graph)), {}, "")
            return
        if not way.is_usual and way.form == "contrib" and not CONTRIB & {node.op_type for node in traced.model.graph}:
            return  # the model's experts and recurrences are in standard operators in both forms
        with stage(work.progress, "probe target", work.seconds, of=str(way)):
            self.probe_results[way] = target.ask(skeleton(traced.model), _one_token(traced))

    def reason(self, exported: Exported) -> str:
        """The reason for the lowering of `exported`, in one sentence."""
        way, target = self.by_label[exported.label], self.target
        failures = [f"{other} {error}" for other, error in self.failures.items()]
        if target is None:
            first, reason = _without_target(self.lowering, self.draft.fake)
            others = ["auto: the next choice that runs on the CPU provider", *self.rejections()]
            return reason if way == first else "; ".join(others)
        head = "requested" if self.lowering != AUTO else AUTO
        if target.ask is None:
            default = f"the default for {target.provider}"
            first_choice = f"the next choice after {default}" if failures else default
            return "; ".join([f"{head}: {first_choice}, {target.how}", *failures])
        others = [f"{other} {describe(self.probe_results[other])}" for other in self.ranked(target) if other != way]
        others += [f"{other} does not match: {detail}" for other, detail in self.mismatches.items()]
        others += [*failures, *(f"{other}: {error}" for other, error in self.misfits.items())]
        return "; ".join([f"{head}: {target.provider} {describe(self.probe_results[way])}", *others])

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The manifest record of the target; None without one. `result`: of the known answer on it."""
        results = self.probe_results if self.target is not None and self.target.ask is not None else {}
        requested = tuple(manifest_record(way, found, self.mismatches.get(way, "")) for way, found in results.items())
        unfit = {str(way): str(error) for way, error in self.misfits.items()}
        return target_record(self.target, result, asked=requested, unfit=unfit)


def _one_token(traced: TracedGraph) -> dict[str, tuple[int, ...]]:
    """Input shapes of a graph for one token."""
    sizes = {TOTAL: traced.spec.max_length + 1}  # a growing cache at its maximum before the step
    ports = {
        port.name: tuple(size if isinstance(size, int) else sizes.get(size, 1) for size in port.shape)
        for port in traced.inputs
    }
    return {**ports, **{state.past: state.shape for state in traced.states}}


def _without_target(wanted: str, fake: FakeModel) -> tuple[GraphVariant, str]:
    """The default variant without a target, and the reason."""
    if wanted != AUTO:
        return usual(wanted), "requested"
    best, *others = by_preference()
    fitting = next((each for each in others if not each.same_kv_width), None)
    if best.same_kv_width and fitting and any(layer.key_width != layer.value_width for layer in fake.probed.layers):
        return usual(fitting.name), f"auto: keys and values differ in width, so {best.name} would pad them"
    return usual(best.name), f"auto: {best.merit}, on the CPU provider"
