"""Partita's own exporter: traces transformers' modelling code.

With a target, it is probed with each lowering until one is fully supported. A supported lowering may still compute
wrong results; it is then rejected, and the next is probed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from partita.errors import UnsupportedModelError, UsageError
from partita.export.checkpoint.adapters import adapter_record, read_adapter
from partita.export.checkpoint.adapters.branches import Adapters, SwitchableAdapter, match_switchable
from partita.export.checkpoint.adapters.merge import base_note, merge_adapter
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import match_names, untie
from partita.export.drafts import Draft, Exported, Graphs, quantise_again
from partita.export.options import AUTO, max_length, most_positions
from partita.export.passes.base import TracedGraph
from partita.export.passes.fewer_rows import free_batch
from partita.export.passes.narrow_weights import half_precision_record, narrow, narrow_floats
from partita.export.progress import stage
from partita.export.quantise import Keep, calibration, paths
from partita.export.quantise.mixed_precision import check_size, search
from partita.export.quantise.plan import make_plan, prefill_plan
from partita.export.quantise.rewrite import summary
from partita.export.quantise.stored_integers import AsStored
from partita.export.target import (
    GraphVariant,
    ProbeResult,
    Target,
    candidates,
    describe,
    instead_of,
    rank,
    skeleton,
    target_record,
)
from partita.export.trace import CONTRIB
from partita.export.trace.attention import GROWING, by_preference
from partita.export.trace.fake_model import build_fake_model
from partita.export.trace.ports import TOTAL
from partita.export.trace.recurrence import used_by
from partita.export.verify.package_runs import CPU
from partita.export.weights import external_data as weights
from partita.export.work import Work, check_merged, takes_stored
from partita.export.writing import unfinished_manifest
from partita.package.contract import GraphFile, state_bytes
from partita.package.folder import AdapterRecord, Graph, adapter_file
from partita.package.records import Mix, PrefillChoice, ProbedLowering, TargetRecord, Verification

REPORT = "; nothing was written; please report this model"


def variants(checkpoint: Checkpoint, work: Work, target: Target | None) -> Variants:
    """Build the model on fake tensors. Raises UnsupportedModelError, and UsageError for options without effect."""
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
        fake = build_fake_model(
            checkpoint.config, options.computing.dtype, options.batch_size, length, checkpoint.location
        )
        if adapter is not None:
            checkpoint, notes = merge_adapter(checkpoint, fake.module, adapter)
            work.notes += notes
            check_merged(options, checkpoint)
        work.notes += untie(fake, checkpoint)
    adapters = Adapters(
        merged=() if adapter is None else (adapter_record(adapter, adapter.folder.resolve().name, merged=True),),
        switched=tuple(match_switchable(checkpoint, fake.module, name, each) for name, each in switchable),
    )
    work.notes += [note for _, each in switchable for note in base_note(checkpoint, each, "added as a branch to")]
    plan = prompt_plan = None
    if options.computing.bits is not None:
        with stage(work.progress, "probe target", work.seconds, of=options.precision):
            modules = [name for name, _ in fake.module.named_modules() if name]
            matrices = [name for name, weight in fake.module.named_parameters() if weight.dim() > 1]
            modules += [path for name in matrices for path in paths([name])]
            stored = AsStored(checkpoint) if takes_stored(options, checkpoint) else None
            plan = make_plan(options, target, modules, work.notes.append, stored=stored)
            prompt_plan = prefill_plan(options, target, plan)
    takes = work.supports if target is None else target.supports
    as_stored = plan is not None and plan.stored is not None
    kept = narrow_floats(checkpoint, options.computing, takes) if as_stored else narrow(options.computing, takes)
    sources = match_names(fake.module, checkpoint.tensors)
    return Variants(Draft(work, checkpoint, fake, length, sources, target, plan, text, prompt_plan, kept, adapters))


@dataclass(slots=True)
class Variants:
    """The variants of one draft in order of preference, and the results of probing its target."""

    draft: Draft
    probe_results: dict[GraphVariant, ProbeResult] = field(default_factory=dict)
    misfits: dict[GraphVariant, UnsupportedModelError] = field(default_factory=dict)
    """Variants that the model does not fit."""
    rejected: dict[GraphVariant, str] = field(default_factory=dict)
    """Variants that did not open or run, or (without a failure in their result) computed wrong results -> detail."""
    keep: tuple[Keep, ...] = ()
    mix: Mix | None = None
    """The result of the search for the bits of weights within a budget, which runs once."""

    @property
    def target(self) -> Target | None:
        """The provider of the package; None where it is not probed."""
        return self.draft.target

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
        most = self.draft.work.options.max_weight_size
        if not self.draft.work.options.searches:
            return _exported_model(graphs)
        if not graphs.packing.placed:  # no weight has a choice of bits
            check_size(graphs, most, "and none of them can be quantised")
            return _exported_model(graphs)
        if self.mix is None:
            self.keep, self.mix = search(graphs)
        mixed = quantise_again(graphs, self.keep)
        # another variant may be written in another form than the search used
        check_size(mixed, most, "in the form that the target supports")
        return _exported_model(mixed, self.mix)

    @property
    def _candidates(self) -> list[GraphVariant]:
        """The variants to probe, in order."""
        preferred = by_preference()[0].name if self.target is None else self.target.preferred
        return candidates(preferred, self.draft.work.options.attention)

    def ranked(self) -> list[GraphVariant]:
        """Probed variants that are not rejected, best first."""
        order = list(dict.fromkeys([*self._candidates, *self.probe_results]))
        return [variant for variant in rank(self.probe_results, order) if variant not in self.rejected]

    def reject(self, exported: Exported, detail: str, *, ran: bool) -> None:
        """Reject a variant: wrong results, or (`ran` false) it did not open or run."""
        assert exported.graphs is not None
        variant = exported.graphs.variant
        self.rejected[variant] = detail
        if not ran or self.target is None:
            self.probe_results[variant] = replace(self.probe_results[variant], failure=detail)

    def rejections(self) -> list[str]:
        """The variants that were rejected, or that the model does not fit, with their reasons."""
        found = []
        for variant, detail in self.rejected.items():
            found.append(f"{variant} {'does not match: ' if self._mismatch(variant) else ''}{detail}")
        return found + [f"{variant}: {error}" for variant, error in self.misfits.items()]

    def _mismatch(self, variant: GraphVariant) -> str:
        """The detail of a variant that ran on the target and computed wrong results; empty for others."""
        return "" if self.probe_results[variant].failure else self.rejected.get(variant, "")

    def _probe(self, variant: GraphVariant) -> None:
        """Probe the target with a variant, unless that was done or the model does not fit it."""
        if variant in self.probe_results or variant in self.misfits:
            return
        work, target = self.draft.work, self.target
        try:
            traced = self.draft.graphs(variant).traced_graphs[-1]
        except UnsupportedModelError as error:
            if target is None and not self.rejected:
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
        assert exported.graphs is not None
        variant, target = exported.graphs.variant, self.target
        head = AUTO if self.draft.work.options.attention == AUTO else "requested"
        rejections = self.rejections()
        if target is None or target.ask is None:
            if target is None and head != AUTO:
                return head
            default = "the default" if target is None else f"the default for {target.provider}, {target.how}"
            return "; ".join([f"{head}: {'the next choice after ' if rejections else ''}{default}", *rejections])
        others = [f"{other} {describe(self.probe_results[other])}" for other in self.ranked() if other != variant]
        found = f"{head}: {target.provider} {describe(self.probe_results[variant])}"
        return "; ".join([found, *others, *rejections])

    def record(self, result: Verification | None) -> TargetRecord | None:
        """The manifest record of the target; None without one. `result`: of the known answer on it."""
        results = self.probe_results if self.target is not None and self.target.ask is not None else {}
        probed = tuple(
            ProbedLowering(
                attention=variant.attention,
                form=None if variant.is_usual else variant.form,
                nodes=found.nodes,
                unsupported=dict(found.unsupported),
                error=found.failure,
                untested_nodes=found.untested,
                mismatch=self._mismatch(variant),
            )
            for variant, found in results.items()
        )
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


def _exported_model(graphs: Graphs, mix: Mix | None = None) -> Exported:
    """The exporter's result for traced graphs. `mix`: the record of the search for bits within a budget."""
    draft, first, work = graphs.draft, graphs.traced_graphs[0], graphs.draft.work
    options, fewer = work.options, _make_batch_symbolic(graphs)
    models, packed, prefill = tuple(item.model for item in graphs.traced_graphs), None, None
    if draft.plan is not None:
        packed = summary(draft.plan, graphs.packing).model_copy(update={"mix": mix})
    if draft.prefill_plan is not None and (requested := options.prefill_precision) is not None:
        own = summary(draft.prefill_plan, graphs.prompts)
        prefill = PrefillChoice(requested=requested, reason="requested", packed=own)
    graph = Graph(
        files=_graph_files(graphs),
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
    )
    return Exported(
        work=work,
        checkpoint=draft.checkpoint,
        label=f"`cache={GROWING}`" if graphs.chosen.grows else f"`attention={graphs.variant}`",
        models=models,
        manifest=unfinished_manifest(
            work,
            draft.checkpoint,
            graph,
            weights.parameter_count(models),
            unused=tuple(graphs.unused),
            packed=packed,
            prefill=prefill,
            half_precision=draft.half_weights
            and half_precision_record(draft.half_weights, models, compared=bool(graphs.packing.half_precision)),
            adapters=(*draft.adapters.merged, *map(_switchable_record, draft.adapters.switched)),
        ),
        parameters=draft.fake.parameters,
        caution=_caution(graphs),
        graphs=graphs,
    )


def _switchable_record(each: SwitchableAdapter) -> AdapterRecord:
    """The manifest record of a switchable adapter."""
    files = {"file": adapter_file(each.name), "known_answer": None}
    return adapter_record(each.adapter, each.name, merged=False).model_copy(update=files)


def _make_batch_symbolic(graphs: Graphs) -> bool:
    """Make graphs of a batch run smaller batches, where possible; returns whether they do."""
    draft = graphs.draft
    if draft.work.options.batch_size == 1 or draft.work.options.static_shapes or graphs.chosen.grows:
        return False
    on_host = draft.target is None or draft.target.provider == CPU
    freed = free_batch(graphs.traced_graphs, asks=on_host)
    graphs.traced_graphs = freed or graphs.traced_graphs
    return freed is not None


def _graph_files(graphs: Graphs) -> tuple[GraphFile, ...]:
    """The contract's record of each graph."""
    return tuple(
        GraphFile(
            file=item.file,
            phase=item.phase,
            sequence_length=item.spec.sequence_length,
            nodes=len(list(item.model.graph)),
            inputs=item.inputs,
            outputs=item.outputs,
            adapter_inputs=tuple(port for branch in graphs.branches.values() for port in (branch.down, branch.up)),
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
    return REPORT
