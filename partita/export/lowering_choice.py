"""Choice of a lowering: probe the target with each until one is fully supported.

A supported lowering may still compute wrong results; it is then rejected, and the next is probed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from partita.errors import UnsupportedModelError
from partita.export.drafts import Draft, Graphs
from partita.export.exporters import Attempts, Exported
from partita.export.passes.base import TracedGraph
from partita.export.progress import stage
from partita.export.target import (
    AUTO,
    GraphVariant,
    ProbeResult,
    Target,
    candidates,
    describe,
    instead_of,
    manifest_record,
    rank,
    skeleton,
    target_record,
)
from partita.export.trace import CONTRIB
from partita.export.trace.attention import by_preference
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
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
    misfits: dict[GraphVariant, UnsupportedModelError] = field(default_factory=dict)
    """Variants that the model does not fit."""
    failures: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants that did not open or run -> the error."""
    mismatches: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants with wrong results on the target -> detail of the replay."""

    def best(self) -> Exported | None:
        """The next variant; None when all were tried. Raises UnsupportedModelError when the model fits none."""
        for variant in dict.fromkeys([*self._candidates, *self.probe_results]):
            ranked = self.ranked()
            best = self.probe_results[ranked[0]] if ranked else None
            if best is not None and best.unsupported_count == 0 and best.is_known:
                break
            self._probe(variant)
            if variant in self.probe_results and self.target is not None and self.target.ask is not None:
                # the same lowering with experts and recurrences in the other form, where it may be better
                routed = self.draft.graphs(variant).traced_graphs[-1].has_router
                both = routed or bool(used_by(self.draft.fake.module))
                other = instead_of(variant, self.probe_results[variant], has_both=both)
                if other is not None:
                    self._probe(other)
        if not self.probe_results:
            raise next(iter(self.misfits.values()))
        chosen = next(iter(self.ranked()), None)
        return None if chosen is None else self.write(self.draft.graphs(chosen))

    @property
    def _candidates(self) -> list[GraphVariant]:
        """The variants to probe, in order."""
        preferred = by_preference()[0].name if self.target is None else self.target.preferred
        return candidates(preferred, self.lowering)

    def ranked(self) -> list[GraphVariant]:
        """Probed variants that are not rejected, best first."""
        order = list(dict.fromkeys([*self._candidates, *self.probe_results]))
        rejected = {*self.mismatches, *self.failures}
        return [variant for variant in rank(self.probe_results, order) if variant not in rejected]

    def reject(self, exported: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: wrong results, or (`ran` false) it did not open or run."""
        variant = exported.variant
        assert variant is not None
        if ran and self.target is not None:
            self.mismatches[variant] = detail
            return
        self.failures[variant] = detail
        self.probe_results[variant] = replace(self.probe_results[variant], failure=detail)

    def rejections(self) -> list[str]:
        """The rejected variants with their reasons."""
        return [f"{variant} {error}" for variant, error in self.failures.items()] + [
            f"{variant}: {error}" for variant, error in self.misfits.items()
        ]

    def _probe(self, variant: GraphVariant) -> None:
        """Probe the target with one variant, once."""
        if variant in self.probe_results or variant in self.misfits:
            return
        work, target = self.draft.work, self.target
        try:
            # The last graph is the decode graph, probed with one token.
            traced = self.draft.graphs(variant).traced_graphs[-1]
        except UnsupportedModelError as error:
            if target is None and not self.failures:
                raise
            self.misfits[variant] = error
            return
        if target is None or target.ask is None:
            self.probe_results[variant] = ProbeResult(len(list(traced.model.graph)), {}, "")
            return
        operators = {node.op_type for node in traced.model.graph}
        if not variant.is_usual and variant.form == "contrib" and not CONTRIB & operators:
            return  # the model's experts and recurrences are in standard operators in both forms
        with stage(work.progress, "probe target", work.seconds, of=str(variant)):
            self.probe_results[variant] = target.ask(skeleton(traced.model), _one_token(traced))

    def reason(self, exported: Exported) -> str:
        """The reason for the lowering of `exported`, in one sentence."""
        variant, target = exported.variant, self.target
        assert variant is not None
        head = "requested" if self.lowering != AUTO else AUTO
        failures = [f"{other} {error}" for other, error in self.failures.items()]
        if target is None or target.ask is None:
            default = "the default" if target is None else f"the default for {target.provider}, {target.how}"
            first_choice = f"the next choice after {default}" if failures else default
            return head if target is None and head != AUTO else "; ".join([f"{head}: {first_choice}", *failures])
        others = [f"{other} {describe(self.probe_results[other])}" for other in self.ranked() if other != variant]
        others += [f"{other} does not match: {detail}" for other, detail in self.mismatches.items()]
        others += [*failures, *(f"{other}: {error}" for other, error in self.misfits.items())]
        return "; ".join([f"{head}: {target.provider} {describe(self.probe_results[variant])}", *others])

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The manifest record of the target; None without one. `result`: of the known answer on it."""
        results = self.probe_results if self.target is not None and self.target.ask is not None else {}
        probed = tuple(manifest_record(each, found, self.mismatches.get(each, "")) for each, found in results.items())
        excluded = {str(variant): str(error) for variant, error in self.misfits.items()}
        return target_record(self.target, result, probed=probed, excluded=excluded)


def _one_token(traced: TracedGraph) -> dict[str, tuple[int, ...]]:
    """Input shapes of a graph for one token."""
    sizes = {TOTAL: traced.spec.max_length + 1}  # a growing cache at its maximum before the step
    ports = {
        port.name: tuple(size if isinstance(size, int) else sizes.get(size, 1) for size in port.shape)
        for port in traced.inputs
    }
    return {**ports, **{state.past: state.shape for state in traced.states}}
