"""A model on the way to a package: its graphs in one lowering or another, traced and rewritten, nothing written yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from partita.errors import UnsupportedModelError
from partita.export import known_answer, weights
from partita.export.attention import Lowering, lowering
from partita.export.checkpoint import Checkpoint
from partita.export.naming import match_names
from partita.export.options import DEFAULT_PREFILL_CHUNK, ExportOptions
from partita.export.passes import run_all
from partita.export.progress import Progress, stage
from partita.export.tracing import FakeModel, Traced, TraceSpec, name_nodes, trace

Phase = tuple[str, Literal["any", "prefill", "decode"], int | None]
"""File name, phase and fixed S of a graph."""


@dataclass(slots=True)
class Work:
    """State handed from stage to stage."""

    options: ExportOptions
    progress: Progress
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Graphs:
    """The graphs of a package in one lowering."""

    draft: Draft
    chosen: Lowering
    traced: list[Traced]
    passes: dict[str, int]


@dataclass(slots=True)
class Draft:
    """What does not depend on the lowering."""

    work: Work
    checkpoint: Checkpoint
    fake: FakeModel
    max_length: int
    known: dict[str, Graphs] = field(default_factory=dict)
    answer: known_answer.KnownAnswer | None = None

    def graphs(self, name: str) -> Graphs:
        """The graphs in the lowering `name`; made once. Raises UnsupportedModelError when the model does not fit it."""
        if name not in self.known:
            self.known[name] = self._trace(lowering(name))
        return self.known[name]

    def known_answer(self) -> known_answer.KnownAnswer:
        """What the original model computes; run once."""
        if self.answer is None:
            self.answer = known_answer.compute(self.checkpoint, self.fake.vocab_size, self.max_length)
        return self.answer

    def _trace(self, chosen: Lowering) -> Graphs:
        options, work = self.work.options, self.work
        if options.opset is not None and options.opset < chosen.min_opset:
            raise UnsupportedModelError(f"--opset {options.opset}: {chosen.name} needs {chosen.min_opset} or newer")
        with stage(work.progress, "trace", work.seconds):
            traced = [
                trace(self.fake, chosen, spec(options, chosen, self.max_length, length))
                for _, _, length in phases(options, self.max_length)
            ]
        graphs = Graphs(self, chosen, traced, {})
        with stage(work.progress, "rewrite", work.seconds):
            rewrite(graphs)
        return graphs


def phases(options: ExportOptions, max_length: int) -> list[Phase]:
    """The graphs that a package has."""
    if not options.static_shapes:
        return [("model.onnx", "any", None)]
    chunk = min(options.prefill_chunk or DEFAULT_PREFILL_CHUNK, max_length)
    return [("prefill.onnx", "prefill", chunk), ("decode.onnx", "decode", 1)]


def spec(options: ExportOptions, chosen: Lowering, max_length: int, length: int | None) -> TraceSpec:
    """The fixed sizes of one graph; `length`: S, None when it is symbolic."""
    return TraceSpec(options.batch_size, max_length, length, options.opset or chosen.opset)


def rewrite(graphs: Graphs) -> None:
    """Give the graphs their weights by reference, and run every pass."""
    draft = graphs.draft
    checkpoint, fake, work = draft.checkpoint, draft.fake, draft.work
    sources = match_names(fake.module, checkpoint.tensors)
    for item in graphs.traced:
        weights.attach(item.model, checkpoint, sources, fake.stored_buffers())
        for name, count in run_all(item.model).items():
            graphs.passes[name] = graphs.passes.get(name, 0) + count
        name_nodes(item.model)
    unused = weights.unused_tensors([t.model for t in graphs.traced], checkpoint, sources)
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        told = f"the model does not use these tensors of the checkpoint: {', '.join(unused[:5])}{more}"
        if told not in work.notes:
            work.notes.append(told)
