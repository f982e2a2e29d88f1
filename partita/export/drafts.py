"""The graphs of a model before they are written: traced and rewritten.

Selection of the graphs that read convolution or recurrent states from the previous step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.adapters.branches import (
    Adapters,
    Branch,
    SwitchableAdapter,
    add_branches,
    add_to,
    weights_text,
)
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.options import DEFAULT_PREFILL_CHUNK, RECURRENT_PREFILL_CHUNK, WINDOW
from partita.export.passes import ORDER
from partita.export.passes.base import TracedGraph
from partita.export.passes.cleaning import name_nodes
from partita.export.passes.manager import run_on_copy
from partita.export.passes.narrow_weights import WIDE, Narrow, keep_narrow, rounded_weights, store_narrow
from partita.export.progress import Stage, stage
from partita.export.quantise import Keep, calibration
from partita.export.quantise.plan import Plan
from partita.export.quantise.products import selected_tensors
from partita.export.quantise.reference import movable, round_weights
from partita.export.quantise.rewrite import Outcome, not_packed, quantise, summary
from partita.export.target import GraphVariant, NodeSupport, Target
from partita.export.trace import DOMAIN, PLACEHOLDERS
from partita.export.trace.attention import Lowering, lowering
from partita.export.trace.fake_model import FakeModel
from partita.export.trace.ports import TraceSpec
from partita.export.trace.recurrence import used_by
from partita.export.trace.repeats import layers
from partita.export.trace.tracing import FixedLengthError, trace, without_unread
from partita.export.verify import known_answer
from partita.export.verify.texts import Text
from partita.export.weights import external_data as weights
from partita.export.weights import memory_map
from partita.export.weights.sources import FloatSource
from partita.export.work import Work, add_note
from partita.package.folder import Manifest, not_exported
from partita.package.known_answer import KnownAnswer
from partita.package.records import Calibration, PackedWeights
from partita.process import free_bytes

FREE_MODELS = 2
"""Free memory, as a multiple of the float32 source model's, with which it stays in memory."""


def continuing(work: Work, traced: list[TracedGraph]) -> list[TracedGraph]:
    """The graphs that read every state they get. A second prompt chunk of the others would ignore the first."""
    forgets = [name for item in traced for name in _unread_states(item)]
    kept = [item for item in traced if not _unread_states(item)]
    if not kept:
        raise UnsupportedModelError(
            f"the model writes the state {forgets[0]} but never reads it, so it cannot be exported"
        )
    if len(kept) < len(traced):
        add_note(work, "its recurrent state advances one token per step, so prompts are prefilled one token at a time")
        return [replace(kept[-1], file="model.onnx", phase="any")]
    return traced


def _unread_states(item: TracedGraph) -> list[str]:
    """States that a graph gets and does not read."""
    used = {value.name for node in item.model.graph for value in node.inputs if value is not None}
    return [state.past for state in item.states if state.past not in used]


@dataclass(slots=True)
class Graphs:
    """The graphs of a package in one variant."""

    draft: Draft
    variant: GraphVariant
    chosen: Lowering
    traced_graphs: list[TracedGraph]
    """One per file."""
    passes: Counter[str] = field(default_factory=Counter)
    """Number of changes by pass."""
    unused: list[str] = field(default_factory=list)
    """Checkpoint tensors that no graph uses, by module."""
    packing: Outcome = field(default_factory=Outcome)
    """The outcome of quantisation."""
    prompts: Outcome = field(default_factory=Outcome)
    """The outcome of quantisation for weights of the prefill graph alone."""
    branches: dict[str, Branch] = field(default_factory=dict)
    """Name of input A -> adapter branch."""
    unpacked: list[TracedGraph] = field(default_factory=list)
    """The graphs from before quantisation; copies where it may be repeated."""

    @property
    def file_bytes(self) -> int:
        """Size of the weight file in bytes, including padding."""
        return weights.file_bytes(item.model for item in self.traced_graphs)


@dataclass(slots=True)
class Draft:
    """The parts of a model that do not depend on the variant."""

    work: Work
    checkpoint: Checkpoint
    fake: FakeModel
    max_length: int
    sources: Sources
    """The origin of every parameter."""
    target: Target | None = None
    """The provider of the package; None where it is not probed."""
    plan: Plan | None = None
    """The quantisation plan; None without quantised weights."""
    text: Text | None = None
    """The calibration text; None without one."""
    prefill_plan: Plan | None = None
    """The quantisation plan of a separate prefill graph; None without one."""
    half_weights: Narrow | None = None
    """How weights are stored in 16 bits and computed in float32; None without them."""
    adapters: Adapters = field(default_factory=Adapters)
    variants: dict[GraphVariant, Graphs] = field(default_factory=dict)
    placeholders: frozenset[str] = PLACEHOLDERS
    """Of the next trace; see `TraceSpec`."""

    def graphs(self, variant: GraphVariant) -> Graphs:
        """The graphs of a variant, cached. Raises UnsupportedModelError when the model does not fit it."""
        if variant not in self.variants:
            self.placeholders = frozenset() if self.supports is None else PLACEHOLDERS  # they need a probed target
            self.variants[variant] = self._trace(variant)
        return self.variants[variant]

    @property
    def supports(self) -> NodeSupport | None:
        """Probes the provider of the package with nodes; None where it is not probed."""
        return self.work.supports if self.target is None else self.target.supports

    def _trace(self, variant: GraphVariant) -> Graphs:
        options, work, chosen = self.work.options, self.work, lowering(variant.attention)
        if options.opset is not None and options.opset < chosen.min_opset:
            raise UnsupportedModelError(
                f"`opset={options.opset}`: {chosen.name} needs opset {chosen.min_opset} or newer",
                option="opset",
            )
        with stage(
            work.progress, "trace", work.seconds, len(layers(self.fake.module)), "layers", of=str(variant)
        ) as current:
            try:
                traced = self._trace_phases(variant, current)
            except UnsupportedModelError as error:
                if not (outside := self.fake.probed.outside_cache):
                    raise
                raise UnsupportedModelError(
                    f"the model keeps {outside[0]} between steps outside transformers' cache, which is not "
                    f"supported: {error}",
                    option=error.option,
                ) from error
        if self.fake.probed.recurs:
            traced = continuing(work, traced)
        for note in (note for item in traced for note in item.notes):
            add_note(work, note)
        graphs = Graphs(self, variant, chosen, traced)
        with stage(work.progress, "rewrite", work.seconds, of=str(variant)):
            _rewrite(graphs)
        left = {node.op_type for item in graphs.traced_graphs for node in item.graph if node.domain == DOMAIN}
        if self.placeholders & left:
            self.placeholders -= left  # the target lacks an operator, or its pass is disabled
            return self._trace(variant)
        return graphs

    def _trace_phases(self, variant: GraphVariant, current: Stage) -> list[TracedGraph]:
        """One graph for any number of tokens where the model's code can be traced so, a static pair otherwise."""
        probed = self.fake.probed
        loops = any(extra.kind == "recurrent" for extra in probed.extras)  # over tokens, in standard operators
        if loops and variant.form == "contrib":
            loops = not used_by(self.fake.module)
        if self.work.options.static_shapes or loops:
            return self._trace_all(variant, current, fixed=True)
        try:
            return self._trace_all(variant, current, fixed=False)
        except UnsupportedModelError as error:
            # A model that got 0 cached tokens might silently take a branch for it.
            if not probed.length_as_tensor or not (probed.recurs or isinstance(error, FixedLengthError)):
                raise
            add_note(
                self.work,
                f"exported as a static pair of graphs, because one with a dynamic number of tokens failed: {error}",
            )
        return self._trace_all(variant, current, fixed=True)

    def _trace_all(self, variant: GraphVariant, current: Stage, *, fixed: bool) -> list[TracedGraph]:
        """One graph for any number of tokens; `fixed`: one for a chunk, and one for a token."""
        options = self.work.options
        if fixed and (options.prefill_chunk or 0) > self.max_length:
            add_note(self.work, f"`prefill_chunk={options.prefill_chunk}` is above the cache length {self.max_length}")
        chosen = lowering(variant.attention)
        plans = [self.plan, self.prefill_plan]
        oldest = max((plan.form.opset for plan in plans if plan is not None), default=1)
        opset, rolls = options.opset or max(oldest, chosen.opset), options.cache == WINDOW

        def graph(length: int | None) -> TracedGraph:
            spec = TraceSpec(options.batch_size, self.max_length, length, opset, variant.form, rolls, self.placeholders)
            return trace(self.fake, chosen, spec, current)

        if not fixed:
            return [graph(None)]
        default = RECURRENT_PREFILL_CHUNK if self.fake.probed.recurs else DEFAULT_PREFILL_CHUNK
        chunk = min(options.prefill_chunk or default, self.max_length)
        return as_pair(graph(chunk), graph(1))


@dataclass(frozen=True, slots=True)
class Exported:
    """The graphs of a model in one variant, and the manifest of their package as far as it is known."""

    work: Work
    checkpoint: Checkpoint
    label: str
    """The option that selects this variant, e.g. `attention=gqa`."""
    models: tuple[ir.Model, ...]
    """One per file of the manifest. Weights may be lazy sources or tensors."""
    manifest: Manifest
    parameters: int
    """Parameters of the source model."""
    caution: str
    """A known limitation of this kind of model with its remedy, as the end of a sentence."""
    graphs: Graphs | None = None
    """None: of another exporter."""

    @property
    def switched(self) -> tuple[SwitchableAdapter, ...]:
        """The adapters that a run can switch on."""
        return () if self.graphs is None else self.graphs.draft.adapters.switched

    @property
    def model_folder(self) -> Path | None:
        """The folder for the parameters of the source model. None: in memory, where a run of the package needs as much
        and there is enough."""
        size = 4 * sum(math.prod(info.shape) for info in self.checkpoint.tensors.values())
        return self.work.scratch if self.work.options.quantises or free_bytes() < FREE_MODELS * size else None

    @property
    def calibrates(self) -> bool:
        """Whether the weights are calibrated on a text before they are written."""
        return self.graphs is not None and self.graphs.draft.text is not None

    def known_answer(
        self, adapter: SwitchableAdapter | None = None, first: Callable[[Any], object] | None = None
    ) -> KnownAnswer:
        """The outputs of the source model with the package's weights and `adapter`; cached. `first` gets the model."""
        graph, work, graphs = self.manifest.graph, self.work, self.graphs
        chunk = max((file.sequence_length or 0 for file in graph.files if file.phase == "prefill"), default=0)
        recurs = any(state.kind in ("conv", "recurrent") for state in graph.states)
        tokens = max(known_answer.PROMPT_TOKENS, 2 * chunk + 1 if recurs else 0)
        packing, prompts = (Outcome(), Outcome()) if graphs is None else (graphs.packing, graphs.prompts)
        placed, narrowed, changed = packing.placed, packing.half_precision, prompts.placed
        key = tokens, frozenset((*placed, *changed, *narrowed)), "" if adapter is None else adapter.name
        if key in work.known_answers:
            return work.known_answers[key]

        def rounded(model: Any) -> None:
            assert graphs is not None
            round_weights(model, [*placed.values(), *narrowed.values()], graphs.draft.sources)

        def prepared(model: Any) -> None:
            assert graphs is not None
            rounded(model)
            if adapter is not None:
                add_to(model, adapter)
            round_weights(model, changed.values(), graphs.draft.sources)

        answer = work.known_answers[key] = known_answer.compute(
            self.checkpoint,
            graph.vocab_size,
            graph.max_length,
            tokens,
            crossed=work.options.verify_length or known_answer.CROSSED_TOKENS,
            first=first,
            prepare=prepared if key[1] or adapter is not None else None,
            weights=weights_text(placed or narrowed, changed, adapter),
            afterwards=rounded if changed else None,
            scratch=self.model_folder,
        )
        return answer

    def calibrate(self, folder: Path, stage: Stage) -> PackedWeights:
        """Calibrate the weights into `folder`, which must exist until they are written. Returns their record."""
        assert self.graphs is not None
        draft, packing = self.graphs.draft, self.graphs.packing
        plan, text, scratch = draft.plan, draft.text, self.work.scratch
        assert plan is not None and text is not None
        placed = tuple(packing.placed.values())
        held = memory_map.resident_parameters(self.checkpoint.tensors, scratch)
        calibration.check_calibration_memory(placed, held, draft.fake.hidden_size, text)
        plan.rounded.begin(folder)
        model = known_answer.load(self.checkpoint, scratch)
        left = calibration.calibrate(model, self.checkpoint, text, placed, draft.sources, stage)
        record = Calibration(
            quantiser=plan.quantiser,
            text=text.name,
            text_sha256=text.sha256,
            tokens=text.tokens,
            window_tokens=text.windows.shape[1],
            not_calibrated=tuple(left),
        )
        assert self.manifest.packed is not None
        found = {"calibration": record, "kinds": summary(plan, packing).kinds}
        return self.manifest.packed.model_copy(update=found)


def as_pair(prefill: TracedGraph, decode: TracedGraph) -> list[TracedGraph]:
    """A graph for prompts, and one for single tokens."""
    return [
        replace(prefill, file="prefill.onnx", phase="prefill"),
        replace(decode, file="decode.onnx", phase="decode"),
    ]


def quantise_again(graphs: Graphs, keep: Sequence[Keep]) -> Graphs:
    """The same graphs, quantised with more settings of modules."""
    plan = graphs.draft.plan
    assert plan is not None
    of_traces = {each.name for each in ORDER}
    again = replace(
        graphs,
        draft=replace(graphs.draft, plan=replace(plan, keep=(*plan.keep, *keep))),
        traced_graphs=list(graphs.unpacked),  # `_store` replaces them
        passes=Counter({name: count for name, count in graphs.passes.items() if name in of_traces}),
        packing=Outcome(kept_for_selection=graphs.packing.kept_for_selection),
        prompts=Outcome(),
    )
    _store(again)
    return again


def _rewrite(graphs: Graphs) -> None:
    """Attach the weights lazily, and run every pass."""
    draft = graphs.draft
    checkpoint, fake, work = draft.checkpoint, draft.fake, draft.work
    sources = draft.sources
    for index, item in enumerate(graphs.traced_graphs):
        weights.attach(item.model, checkpoint, sources, fake.stored_buffers())
        passes = [each for each in ORDER if each.name not in work.options.without_pass]
        rewritten, counts = run_on_copy(item, passes, draft.supports)
        graphs.passes.update(counts)
        graphs.traced_graphs[index] = traced = without_unread(rewritten)
        if draft.adapters.switched:
            fixed = item.spec.sequence_length is not None
            graphs.branches |= add_branches(traced.model, draft.adapters.switched, item.spec.batch, fixed=fixed)
        name_nodes(traced.model)
        graphs.unpacked.append(traced)
    graphs.packing.kept_for_selection = selected_tensors(item.model for item in graphs.traced_graphs)
    _store(graphs)
    if draft.plan is not None:
        if not graphs.packing.placed:
            add_note(work, f"no weight of this model can be quantised to int{draft.plan.bits}")
        for phrase in not_packed(graphs.packing):
            add_note(work, f"not quantised: {phrase}")
        for each in draft.plan.keep:
            if not any(map(each.fits, graphs.packing.modules)):
                option = f"`keep={each.pattern}={each.precision}`"
                add_note(work, f"{option} has no effect: no quantisable weight matches")
    graphs.unused = unused = weights.unused_tensors([t.model for t in graphs.traced_graphs], checkpoint, sources)
    if unused:
        add_note(work, f"omitted, because the logits do not depend on it: {not_exported(unused)}")


def _store(graphs: Graphs) -> None:
    """Quantise the weights, and store others in 16 bits, by the plans of the draft."""
    draft, plan = graphs.draft, graphs.draft.plan
    fits = movable(draft.sources)
    repeats = plan is not None and (draft.work.options.searches or draft.prefill_plan is not None)
    for index, unpacked in enumerate(graphs.unpacked):
        traced = unpacked.copy() if repeats else unpacked
        graphs.traced_graphs[index] = traced
        if plan is not None:  # after nodes have names: settings are by module
            graphs.passes.update(quantise(traced, plan, graphs.packing, fits))
            graphs.passes.update(keep_narrow(traced, plan, graphs.packing, draft.supports))
        if draft.half_weights is not None:
            graphs.passes.update(store_narrow(traced, draft.half_weights))
        name_nodes(traced.model)
    if draft.work.options.computing.dtype == WIDE:
        models = [item.model for item in graphs.traced_graphs]
        graphs.packing.half_precision = rounded_weights(models, fits, partly=plan is not None)
    if draft.prefill_plan is not None:
        _add_prefill(graphs, draft.prefill_plan, fits)


def _add_prefill(graphs: Graphs, own_plan: Plan, fits: Callable[[FloatSource], bool]) -> None:
    """Add a prefill graph before the only graph. Raises UnsupportedModelError where that is impossible."""
    plan, shared, own = graphs.draft.plan, Outcome(), Outcome()
    assert plan is not None
    traced = graphs.unpacked[0].copy()
    single = len(graphs.traced_graphs) == 1 and traced.spec.sequence_length is None
    if single and all(port.role != "rope_length" for port in traced.inputs) and not graphs.draft.fake.probed.recurs:
        graphs.passes.update(quantise(traced, own_plan, own, fits, rest=plan))
        graphs.passes.update(quantise(traced, plan, shared, fits))
    if not own.placed:
        option = f"`prefill_precision={graphs.draft.work.options.prefill_precision}`"
        needs = "a model without recurrent states, with a matrix product to quantise, and one graph for any length"
        raise UnsupportedModelError(f"{option}: it needs {needs}; omit it", option="prefill_precision")
    graphs.passes.update(keep_narrow(traced, plan, shared, graphs.draft.supports))
    name_nodes(traced.model)
    graphs.prompts = own
    graphs.traced_graphs = as_pair(traced, graphs.traced_graphs[0])
