"""The export itself, stage by stage: describe, trace, rewrite, write weights, answer, verify, publish.

Everything is written to a hidden folder next to the target and renamed at the end, the manifest last: a killed or
failed export leaves nothing that looks like a package. Replaying the known answer needs the runtime, which this folder
may not import: the caller passes a function.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

import partita
from partita.errors import ParityError, ProviderError, ResourceError, UnsupportedModelError, UsageError
from partita.export import bf16_twin, known_answer, weights
from partita.export.attention import Lowering, lowering
from partita.export.checkpoint import Checkpoint, open_checkpoint, source_files
from partita.export.naming import match_names
from partita.export.passes import run_all
from partita.export.progress import Progress, Silent, stage
from partita.export.publish import check_target, make_parents, publish
from partita.export.target import Answer, Choice, Target, asked, candidates, describe, rank, skeleton
from partita.export.tokenizer import probe_tokenizer
from partita.export.tracing import FakeModel, Traced, TraceSpec, build_fake_model, name_nodes, trace
from partita.package import (
    KNOWN_ANSWER,
    WEIGHTS,
    FileRecord,
    Graph,
    GraphFile,
    Manifest,
    Source,
    TargetRecord,
    TokenizerKind,
    Verification,
    record_file,
    sha256_of,
    write_manifest,
)

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DEFAULT_MAX_LENGTH = 2048
DEFAULT_PREFILL_CHUNK = 128
OLDEST_OPSET = 17
MAX_OPSET = 24
"""Highest operator set that the pinned torch exporter writes."""
TOOLS = ("partita", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy", "tokenizers")

Replay = Callable[[Path, Manifest], Verification]
"""Replays the known answer of an unpublished package on the CPU provider: folder, manifest -> result."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, and how. Sizes in tokens."""

    checkpoint: str
    out: Path
    precision: str = "fp32"
    max_length: int | None = None
    batch_size: int = 1
    attention: str = "auto"
    static_shapes: bool = False
    prefill_chunk: int | None = None
    verify: bool = True
    force: bool = False
    opset: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What an export did."""

    out: Path
    manifest: Manifest
    attention_reason: str
    passes: dict[str, int]
    seconds: dict[str, float]
    peak_rss_bytes: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Work:
    """State handed from stage to stage."""

    options: ExportOptions
    progress: Progress
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def export(
    options: ExportOptions, *, replay: Replay, target: Target | None = None, progress: Progress | None = None
) -> Summary:
    """Export a checkpoint to a package, for `target` where there is one.

    Raises a PartitaError that names what is wrong; nothing that looks like a package is left behind.
    """
    check_options(options)
    check_target(options.checkpoint, options.out, force=options.force)
    with ExitStack() as cleanup:
        try:
            make_parents(options.out.parent, cleanup)
            folder = Path(tempfile.mkdtemp(dir=options.out.parent, prefix=f".{options.out.name}.partial-"))
        except OSError as error:
            raise ResourceError(f"{options.out.parent}: cannot make a folder there ({error.strerror})") from error
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            summary = _run(_Work(options, progress or Silent(), folder), replay, target)
            publish(folder, options.out)
        except OSError as error:
            raise weights.translate_space(error, folder) from error
        except MemoryError as error:
            raise ResourceError(
                f"{options.checkpoint}: memory ran out; a smaller --max-length or --batch-size needs less, and "
                "--no-verify "
                "does without the original model"
            ) from error
        cleanup.pop_all()
    return summary


def check_options(options: ExportOptions) -> None:
    """Check what needs no checkpoint. Raises UsageError."""
    if options.precision not in PRECISIONS:
        raise UsageError(f"--precision {options.precision}: choose one of {', '.join(PRECISIONS)}")
    for name, value in (
        ("max-length", options.max_length),
        ("batch-size", options.batch_size),
        ("prefill-chunk", options.prefill_chunk),
    ):
        least = 2 if name == "max-length" else 1  # one token of prompt and one of answer
        if value is not None and not least <= value <= 1 << 24:
            raise UsageError(f"--{name} {value}: must be between {least} and {1 << 24:,}")
    if options.prefill_chunk is not None and not options.static_shapes:
        raise UsageError("--prefill-chunk fixes the shape of prefill.onnx: it needs --static-shapes")
    if options.attention != "auto":
        chosen = lowering(options.attention)
        if options.opset is not None and options.opset < chosen.min_opset:
            raise UsageError(
                f"--opset {options.opset}: --attention {chosen.name} needs opset {chosen.min_opset} or newer"
            )
    if options.opset is not None and not OLDEST_OPSET <= options.opset <= MAX_OPSET:
        raise UsageError(f"--opset {options.opset}: must be between {OLDEST_OPSET} and {MAX_OPSET}")


def _run(work: _Work, replay: Replay, target: Target | None) -> Summary:
    options = work.options
    with stage(work.progress, "read checkpoint", work.seconds):
        checkpoint = open_checkpoint(options.checkpoint)
        max_length = _max_length(options, checkpoint)
    with stage(work.progress, "trace", work.seconds):
        fake = build_fake_model(checkpoint.config, PRECISIONS[options.precision], options.batch_size, max_length)
    draft = _Draft(work, checkpoint, fake, max_length)
    if target is None:
        chosen, reason = _choose_lowering(options, fake)
        return _write(draft.graphs(chosen.name), replay, reason, None)
    choice = ask_target(draft, target, options.attention)
    for number, name in enumerate(choice.order):
        try:
            return _write(draft.graphs(name), replay, choice.reason, (target, choice))
        except TargetParityError as error:
            if number + 1 == len(choice.order):
                raise
            work.notes.append(f"--attention {name} was tried and left: {error}")
            _empty(work.folder)
    raise AssertionError("unreachable: there is always a lowering to try")


class TargetParityError(ParityError):
    """The graph computes what its model computes on the CPU provider, and not on the provider that it is for."""


def _empty(folder: Path) -> None:
    """Forget what was written of a package."""
    for path in folder.iterdir():
        path.unlink()


@dataclass(slots=True)
class _Graphs:
    """The graphs of a package in one lowering, traced and rewritten, without weights on disk."""

    draft: _Draft
    chosen: Lowering
    traced: list[Traced]
    passes: dict[str, int]


@dataclass(slots=True)
class _Draft:
    """A model on the way to a package; what does not depend on the lowering."""

    work: _Work
    checkpoint: Checkpoint
    fake: FakeModel
    max_length: int
    known: dict[str, _Graphs] = field(default_factory=dict)

    def graphs(self, name: str) -> _Graphs:
        """The graphs in the lowering `name`; made once. Raises UnsupportedModelError when the model does not fit it."""
        if name not in self.known:
            self.known[name] = self._trace(lowering(name))
        return self.known[name]

    def _trace(self, chosen: Lowering) -> _Graphs:
        options, work = self.work.options, self.work
        with stage(work.progress, "trace", work.seconds):
            traced = [
                trace(self.fake, chosen, _spec(options, chosen, self.max_length, length))
                for _, _, length in _phases(options, self.max_length)
            ]
        graphs = _Graphs(self, chosen, traced, {})
        with stage(work.progress, "rewrite", work.seconds):
            _rewrite(graphs)
        return graphs


def ask_target(draft: _Draft, target: Target, wanted: str) -> Choice:
    """Ask the target about each lowering until it takes one whole; which to try, in which order.

    A lowering that the user named is asked about and taken, whatever the answer. Raises UnsupportedModelError when the
    model fits no lowering.
    """
    work, answers, unfit = draft.work, dict[str, Answer](), dict[str, UnsupportedModelError]()
    names = candidates(target, wanted)
    choice = Choice(names)
    for name in names:
        try:
            graphs = draft.graphs(name)
        except UnsupportedModelError as error:
            if len(names) == 1:
                raise
            unfit[name] = error
            continue
        if target.ask is None:
            answers[name] = Answer(len(list(graphs.traced[-1].model.graph)), {}, "")
            break
        with stage(work.progress, "ask target", work.seconds):
            # The last graph is the one for decode; a step of one token is what is asked about.
            answers[name] = target.ask(skeleton(graphs.traced[-1].model), _one_token(graphs.traced[-1]))
        choice.asked.append(asked(name, answers[name]))
        if answers[name].misses == 0:
            break
    if not answers:
        raise next(iter(unfit.values()))
    choice.order = rank(answers, names)
    choice.reason = _reason(target, wanted, choice, answers, unfit)
    return choice


def _one_token(traced: Traced) -> dict[str, tuple[int, ...]]:
    """Sizes of the inputs of a graph that reads one token."""
    ports = {port.name: tuple(size if isinstance(size, int) else 1 for size in port.shape) for port in traced.inputs}
    return {**ports, **{state.past: state.shape for state in traced.states}}


def _reason(
    target: Target, wanted: str, choice: Choice, answers: dict[str, Answer], unfit: dict[str, UnsupportedModelError]
) -> str:
    """Why the lowering, in one sentence."""
    best = choice.order[0]
    head = "asked for" if wanted != "auto" else "auto"
    if target.ask is None:
        return f"{head}: the default for {target.provider}, {target.how}"
    others = [f"{name} {describe(answers[name])}" for name in choice.order[1:]]
    others += [f"{name}: {error}" for name, error in unfit.items()]
    told = f"{head}: {target.provider} {describe(answers[best])}"
    return f"{told}; {'; '.join(others)}" if others else told


def _write(graphs: _Graphs, replay: Replay, reason: str, target: tuple[Target, Choice] | None) -> Summary:
    """Write the package into the work folder, and verify it."""
    draft, chosen, traced = graphs.draft, graphs.chosen, graphs.traced
    work, checkpoint, max_length = draft.work, draft.checkpoint, draft.max_length
    options, phases = work.options, _phases(work.options, max_length)
    models = [t.model for t in traced]
    parameters, planned = weights.parameter_count(models), weights.planned_bytes(models)
    if options.verify:
        cache = sum(_nbytes(state.shape, state.dtype) for state in traced[0].states)
        # The bfloat16 twin keeps its cache in float32.
        known_answer.check_memory(parameters, cache * 2 if options.precision == "bf16" else cache)
    _check_space(options.out.parent, planned)
    with stage(work.progress, "write weights", work.seconds, planned) as current:
        data = weights.write_data(models, work.folder, current)
    with stage(work.progress, "write graph", work.seconds):
        for (file, _, _), model in zip(phases, models, strict=True):
            ir.save(model, work.folder / file)
        for name in checkpoint.companions():
            shutil.copyfile(checkpoint.folder / name, work.folder / name)
        source = _source(checkpoint, parameters)
        tokenizer = probe_tokenizer(work.folder, checkpoint.companions())
        if tokenizer == "none":
            work.notes.append("the checkpoint has no tokenizer: generate will need --token-ids")
    files = tuple(
        GraphFile(
            file=file,
            phase=phase,
            sequence_length=length,
            nodes=len(list(t.model.graph)),
            inputs=t.inputs,
            outputs=t.outputs,
        )
        for (file, phase, length), t in zip(phases, traced, strict=True)
    )
    graph = _graph(options, draft.fake, traced[0], files, max_length, chosen, data.size_bytes)
    manifest = _manifest(work, source, graph, data, tokenizer)
    manifest = _verify(work, manifest, checkpoint, models, phases, replay)
    if target is not None:
        manifest = manifest.model_copy(update={"target": _verify_target(work, manifest, *target)})
    write_manifest(work.folder, manifest)
    return Summary(options.out, manifest, reason, graphs.passes, work.seconds, _peak_rss_bytes(), tuple(work.notes))


def _verify_target(work: _Work, manifest: Manifest, target: Target, choice: Choice) -> TargetRecord:
    """Replay the known answer on the target, where it can run. Raises TargetParityError when it disagrees."""
    if target.replay is None or not work.options.verify:
        return choice.record(target, None)
    with stage(work.progress, "verify target", work.seconds):
        try:
            result = target.replay(work.folder, manifest)
        except ProviderError as error:
            work.notes.append(f"not verified on {target.provider}: {error}")
            return choice.record(target, None)
    if result.status != "verified":
        raise TargetParityError(
            f"{work.options.checkpoint}: {target.provider} does not compute what the model computes: {result.detail}; "
            "nothing was written; name another --attention or another --target"
        )
    return choice.record(target, result)


def _max_length(options: ExportOptions, checkpoint: Checkpoint) -> int:
    """N: as asked, else what the model was made for, at most `DEFAULT_MAX_LENGTH`."""
    made_for = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if options.max_length is None:
        return min(int(made_for or DEFAULT_MAX_LENGTH), DEFAULT_MAX_LENGTH)
    if made_for is not None and options.max_length > made_for:
        raise UsageError(f"--max-length {options.max_length}: the model was made for at most {made_for} positions")
    return options.max_length


def _choose_lowering(options: ExportOptions, fake: FakeModel) -> tuple[Lowering, str]:
    """The lowering, and why it was chosen."""
    if options.attention != "auto":
        return lowering(options.attention), "asked for"
    if any(layer.key_width != layer.value_width for layer in fake.layers):
        return lowering("onnx24"), "auto: keys and values differ in width, which gqa cannot hold"
    return lowering("gqa"), "auto: one fused node per layer, in place, on the CPU provider"


def _phases(
    options: ExportOptions, max_length: int
) -> list[tuple[str, Literal["any", "prefill", "decode"], int | None]]:
    """File name, phase and fixed S of every graph."""
    if not options.static_shapes:
        return [("model.onnx", "any", None)]
    chunk = min(options.prefill_chunk or DEFAULT_PREFILL_CHUNK, max_length)
    return [("prefill.onnx", "prefill", chunk), ("decode.onnx", "decode", 1)]


def _spec(options: ExportOptions, chosen: Lowering, max_length: int, length: int | None) -> TraceSpec:
    return TraceSpec(options.batch_size, max_length, length, options.opset or chosen.opset)


def _rewrite(graphs: _Graphs) -> None:
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


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ResourceError(
            f"{parent}: no space left: the package needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )


def _source(checkpoint: Checkpoint, parameters: int) -> Source:
    files = tuple(
        FileRecord(name=name, size_bytes=size, sha256=sha256_of(checkpoint.folder / name))
        for name, size in source_files(checkpoint)
    )
    return Source(
        checkpoint=checkpoint.given,
        model_type=checkpoint.model_type,
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype,
        parameters=parameters,
        files=files,
    )


def _graph(
    options: ExportOptions,
    fake: FakeModel,
    traced: Traced,
    files: tuple[GraphFile, ...],
    max_length: int,
    chosen: Lowering,
    weight_bytes: int,
) -> Graph:
    cache = sum(_nbytes(state.shape, state.dtype) for state in traced.states)
    return Graph(
        files=files,
        states=traced.states,
        opsets=dict(traced.model.opset_imports),
        attention=chosen.name,
        appends_chunks=options.batch_size == 1 or chosen.appends_in_batches,
        precision=options.precision,
        batch_size=options.batch_size,
        max_length=max_length,
        vocab_size=fake.vocab_size,
        weight_bytes=weight_bytes,
        cache_bytes=cache,
    )


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    size = 4 if dtype == "float32" else 2
    for length in shape:
        size *= length
    return size


def _manifest(work: _Work, source: Source, graph: Graph, data: weights.DataFile, tokenizer: TokenizerKind) -> Manifest:
    files = [FileRecord(name=WEIGHTS, size_bytes=data.size_bytes, sha256=data.sha256)]
    files += [record_file(work.folder, p.name) for p in sorted(work.folder.iterdir()) if p.name != WEIGHTS]
    return Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source,
        graph=graph,
        files=tuple(files),
        tokenizer=tokenizer,
        toolchain=_toolchain(),
        verification=Verification(status="unverified", detail="exported with --no-verify"),
    )


def _toolchain() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = partita.__version__ if name == "partita" else "not installed as a package"
    return versions


def _verify(
    work: _Work,
    manifest: Manifest,
    checkpoint: Checkpoint,
    models: list[ir.Model],
    phases: list[tuple[str, Literal["any", "prefill", "decode"], int | None]],
    replay: Replay,
) -> Manifest:
    """Compute the known answer, replay it, and return the manifest with the result. Raises ParityError when they
    differ.
    """
    if not work.options.verify:
        return manifest
    with stage(work.progress, "known answer", work.seconds):
        answer = known_answer.compute(checkpoint, manifest.graph.vocab_size, manifest.graph.max_length)
        known_answer.save(answer, work.folder)
        manifest = manifest.model_copy(update={"files": (*manifest.files, record_file(work.folder, KNOWN_ANSWER))})
    with stage(work.progress, "verify", work.seconds):
        if work.options.precision == "bf16":
            result = bf16_twin.replay(work.folder, manifest, [file for file, _, _ in phases], replay)
        else:
            result = replay(work.folder, manifest)
    if result.status != "verified":
        raise ParityError(
            f"{work.options.checkpoint}: the exported graph does not compute what the model computes: "
            f"{result.detail}; nothing was "
            "written, please report this model"
        )
    return manifest.model_copy(update={"verification": result})


def _peak_rss_bytes() -> int:
    """Peak resident memory of this process; Linux reports KiB, macOS bytes (getrusage(2))."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
