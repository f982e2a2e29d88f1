"""Partita's own exporter: traces transformers' modelling code.

With a target, it is probed with each lowering until one is fully supported. A supported lowering may still compute
wrong results; it is then rejected, and the next is probed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from partita.dtypes import EXACT
from partita.errors import UnsupportedModelError, UsageError
from partita.export.checkpoint.adapters import adapter_record, read_adapter
from partita.export.checkpoint.adapters.branches import Adapters, SwitchableAdapter, match_switchable, parameters
from partita.export.checkpoint.adapters.merge import merge_adapter
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import untie
from partita.export.drafts import Draft, Graphs, quantise_again
from partita.export.exporters import Attempts, Exported, SwitchedAdapter, Work
from partita.export.options import AUTO, max_length, most_positions
from partita.export.passes.base import TracedGraph
from partita.export.passes.fewer_rows import BATCH, freeing
from partita.export.passes.narrow_weights import kept_narrow, narrow, narrow_floats
from partita.export.progress import stage
from partita.export.quantise import Keep, paths
from partita.export.quantise.calibrate import calibration
from partita.export.quantise.mixed_precision import check_size, search
from partita.export.quantise.plan import make_plan, prefill_plan
from partita.export.quantise.rewrite import summary
from partita.export.quantise.stored_integers import AsStored
from partita.export.resolve import check_merged, takes_stored
from partita.export.target import (
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
from partita.export.trace.attention import GROWING, by_preference
from partita.export.trace.experts import has_stacked
from partita.export.trace.fake_model import build_fake_model
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
from partita.export.verify.smoke_run import CPU
from partita.export.weights import external_data as weights
from partita.package.contract import GraphFile, Port, state_bytes
from partita.package.folder import Graph
from partita.package.records import Mix, PrefillChoice, TargetRecord, Verification

REPORT = "; nothing was written; please report this model"


def attempts(checkpoint: Checkpoint, work: Work, target: Target | None) -> Variants:
    """Build the model on fake tensors. Raises UnsupportedModelError, UsageError for ignored options."""
    options = work.options
    constant = target is not None and target.constant_defaults and not options.static_shapes
    if options.with_adapters and target is not None and constant:
        raise UsageError(
            f"`with_adapters`: {target.provider} treats inputs with defaults as constants, so it would "
            "ignore adapters; add `static_shapes=True`, which removes the defaults"
        )
    length = max_length(options, checkpoint)
    text = None
    if options.calibrate is not None and options.computing.bits is not None:
        text = calibration.read_text(Path(options.calibrate), checkpoint, length)
    adapter = None if options.adapter is None else read_adapter(Path(options.adapter))
    switchable = [(name, read_adapter(Path(folder))) for name, folder in (options.with_adapters or {}).items()]
    with stage(work.progress, "build model", work.seconds):
        fake = build_fake_model(checkpoint.config, options.computing.dtype, options.batch_size, length)
        if adapter is not None:
            checkpoint, notes = merge_adapter(checkpoint, fake.module, adapter)
            work.notes += notes
            check_merged(options, checkpoint)
        work.notes += untie(fake, checkpoint)
    adapters = Adapters(
        merged=() if adapter is None else (adapter_record(adapter, adapter.folder.resolve().name, merged=True),),
        switched=tuple(match_switchable(checkpoint, fake.module, name, each) for name, each in switchable),
    )
    work.notes += [note for each in adapters.switched for note in each.notes]
    plan = prompt_plan = None
    if options.computing.bits is not None:
        with stage(work.progress, "probe target", work.seconds, of=options.precision):
            modules = [name for name, _ in fake.module.named_modules() if name]
            matrices = [name for name, weight in fake.module.named_parameters() if weight.dim() > 1]
            modules += [path for name in matrices for path in paths([name])]
            has_experts = has_stacked(fake.module)
            stored = AsStored(checkpoint) if takes_stored(options, checkpoint) else None
            plan = make_plan(options, target, modules, work.notes.append, has_experts=has_experts, stored=stored)
            prompt_plan = prefill_plan(options, target, plan)
    takes = work.supports if target is None else target.supports
    as_stored = plan is not None and plan.stored is not None
    kept = narrow_floats(checkpoint, options.computing, takes) if as_stored else narrow(options.computing, takes)
    draft = Draft(work, checkpoint, fake, length, target, plan, text, prompt_plan, kept, adapters)
    return Variants(draft)


@dataclass(slots=True)
class Variants(Attempts):
    """The variants of one draft in order of preference, and the results of probing its target."""

    draft: Draft
    target: Target | None = field(init=False)
    lowering: str = field(init=False)
    """A lowering by name, which is used regardless of the results, or auto."""
    probe_results: dict[GraphVariant, ProbeResult] = field(default_factory=dict)
    misfits: dict[GraphVariant, UnsupportedModelError] = field(default_factory=dict)
    """Variants that the model does not fit."""
    failures: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants that did not open or run -> the error."""
    mismatches: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants with wrong results on the target -> detail of the replay."""
    keep: tuple[Keep, ...] = ()
    mix: Mix | None = None
    """The result of the search for the bits of weights within a budget, which runs once."""

    def __post_init__(self) -> None:
        self.target = self.draft.target
        self.lowering = self.draft.work.options.attention

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
        return None if chosen is None else self._exported(self.draft.graphs(chosen))

    def _exported(self, graphs: Graphs) -> Exported:
        """The graphs of a variant, with the bits of weights chosen where there is a budget."""
        options = self.draft.work.options
        if not options.searches:
            return _exported_model(graphs)
        if not graphs.packing.placed:  # no weight has a choice of bits
            check_size(graphs, options.max_weight_size, "and none of them can be quantised")
            return _exported_model(graphs)
        if self.mix is None:
            self.keep, self.mix = search(graphs)
        mixed = quantise_again(graphs, self.keep)
        # another variant may be written in another form than the search used
        check_size(mixed, options.max_weight_size, "in the form that the target supports")
        made = _exported_model(mixed)
        assert made.packed is not None
        return replace(made, packed=made.packed.model_copy(update={"mix": self.mix}))

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


def _exported_model(graphs: Graphs) -> Exported:
    """The exporter's result for traced graphs."""
    draft, first, options = graphs.draft, graphs.traced_graphs[0], graphs.draft.work.options
    fewer = _make_batch_symbolic(graphs)
    models, prefill = tuple(item.model for item in graphs.traced_graphs), None
    if draft.prefill_plan is not None and (requested := options.prefill_precision) is not None:
        packed = summary(draft.prefill_plan, graphs.prompts)
        prefill = PrefillChoice(requested=requested, reason="requested", packed=packed)
    return Exported(
        label=f"`cache={GROWING}`" if graphs.chosen.grows else f"`attention={graphs.variant}`",
        checkpoint=draft.checkpoint,
        models=models,
        graph=Graph(
            files=_graph_files(graphs, BATCH if fewer else first.spec.batch),
            states=first.states,
            appends_chunks=first.spec.batch == 1 or graphs.chosen.appends_in_batches or not draft.fake.probed.layers,
            batch_size=first.spec.batch,
            max_length=draft.max_length,
            vocab_size=draft.fake.vocab_size,
            weight_bytes=weights.planned_bytes(models),
            model_positions=most_positions(draft.checkpoint),
            recompute_above=draft.fake.recompute_above,
            symbolic_batch=fewer,
            opsets=dict(models[0].opset_imports),
            attention=graphs.chosen.name,
            precision=options.precision,
            without_passes=tuple(options.without_pass),
            cache_bytes=state_bytes(first.states),
        ),
        parameters=weights.parameter_count(models),
        original_parameters=draft.fake.parameters,
        known_answer=lambda first: draft.known_answer(graphs, first=first),
        unused=tuple(graphs.unused),
        passes=graphs.passes,
        packed=None if draft.plan is None else summary(draft.plan, graphs.packing),
        calibrate=None if draft.text is None else partial(draft.calibrate, graphs),
        prefill=prefill,
        adapters=draft.adapters.merged,
        switched=tuple(_switchable_adapter(graphs, each) for each in draft.adapters.switched),
        half_weights=None
        if draft.half_weights is None
        else kept_narrow(draft.half_weights, models, graphs.packing.half_precision),
        caution=_caution(graphs),
        variant=graphs.variant,
    )


def _switchable_adapter(graphs: Graphs, each: SwitchableAdapter) -> SwitchedAdapter:
    """The exporter's result for a switchable adapter."""
    return SwitchedAdapter(
        record=adapter_record(each.adapter, each.name, merged=False),
        parameters=lambda: parameters(each, graphs.branches.values()),
        known_answer=lambda: graphs.draft.known_answer(graphs, each),
    )


def _make_batch_symbolic(graphs: Graphs) -> bool:
    """Make graphs of a batch run smaller batches, where possible; returns whether they do."""
    draft = graphs.draft
    if draft.work.options.batch_size == 1 or draft.work.options.static_shapes or graphs.chosen.grows:
        return False
    if graphs.fewer_rows is None:
        on_host = draft.target is None or draft.target.provider == CPU
        found = [freeing(t.model, t.inputs, t.outputs, t.states, asks=on_host) for t in graphs.traced_graphs]
        graphs.fewer_rows = None not in found
        for each in found:
            if each is not None and graphs.fewer_rows:
                each()
    return graphs.fewer_rows


def _by_row(ports: tuple[Port, ...], batch: int, rows: int | str) -> tuple[Port, ...]:
    """Set the first axis of ports with a batch axis to `rows`."""
    return tuple(
        port.model_copy(update={"shape": (rows, *port.shape[1:])})
        if port.role != "logits_rows" and port.shape[:1] == (batch,)
        else port
        for port in ports
    )


def _graph_files(graphs: Graphs, rows: int | str) -> tuple[GraphFile, ...]:
    """The contract's record of each graph; `rows`: B, or the name of the symbolic batch size."""
    batch = graphs.draft.work.options.batch_size
    return tuple(
        GraphFile(
            file=item.file,
            phase=item.phase,
            sequence_length=item.spec.sequence_length,
            nodes=len(list(item.model.graph)),
            inputs=_by_row(item.inputs, batch, rows),
            outputs=_by_row(item.outputs, batch, rows),
            adapter_inputs=tuple(port for branch in graphs.branches.values() for port in branch.inputs),
        )
        for item in graphs.traced_graphs
    )


def _caution(graphs: Graphs) -> str:
    """A known limitation of this kind of model with its remedy, as the end of a sentence."""
    if not graphs.draft.fake.probed.length_as_tensor:
        return (
            "; its code needs the number of cached tokens as a Python int, which a graph does not have; "
            "this is not supported, and nothing was written"
        )
    if any(item.has_router for item in graphs.traced_graphs) and graphs.draft.work.options.computing is not EXACT:
        return f" (rounding may make its router select other experts; try fp32 to confirm){REPORT}"
    return REPORT
