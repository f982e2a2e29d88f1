"""A package is written into a folder of the work, and verified: on the CPU provider, and on the one that it is for."""

from __future__ import annotations

import datetime
import importlib.metadata
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

import partita
from partita import dtypes
from partita.contract import GraphFile
from partita.dtypes import EXACT
from partita.errors import ParityError, ResourceError, UnsupportedModelError
from partita.export import bf16_twin, known_answer, self_check, weights
from partita.export.attention import Lowering
from partita.export.checkpoint import Checkpoint, source_files
from partita.export.choosing import Choices
from partita.export.companions import chat_notes
from partita.export.drafts import Graphs, Phase, Work
from partita.export.fake_model import FakeModel
from partita.export.options import ExportOptions
from partita.export.progress import stage
from partita.export.running import CPU, Replay, Runtime, opened_and_run, run_all
from partita.export.tokenizer import probe_tokenizer
from partita.export.tracing import Traced
from partita.export.weight_files import refuse_pointer
from partita.package import (
    KNOWN_ANSWER,
    WEIGHTS,
    FileRecord,
    Graph,
    Manifest,
    Source,
    TokenizerKind,
    Verification,
    record_file,
    sha256_of,
    write_manifest,
)
from partita.process import peak_rss_bytes

TOOLS = ("partita", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy", "tokenizers")


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


def write(graphs: Graphs, runtime: Runtime, choosing: Choices) -> Summary:
    """Write the package into the work folder, run it, and verify it.

    Raises ParityError; TargetParityError when only the target disagrees; NotRunningError when it does not open or run.
    """
    draft, chosen, traced = graphs.draft, graphs.chosen, graphs.traced
    work, checkpoint, max_length = draft.work, draft.checkpoint, draft.max_length
    options, files_of = work.options, graphs.phases
    models = [t.model for t in traced]
    parameters, planned = weights.parameter_count(models), weights.planned_bytes(models)
    if options.verify:
        twin = options.computing.twin  # which keeps all of its cache in its own type
        cache = sum(dtypes.size_bytes(twin or state.dtype, state.shape) for state in traced[0].states)
        known_answer.check_memory(draft.fake.parameters, cache)
    _check_space(options.out.parent, planned)
    with stage(work.progress, "write weights", work.seconds, planned) as current:
        data = weights.write_data(models, work.folder, current)
    with stage(work.progress, "write graph", work.seconds):
        for (file, _, _), model in zip(files_of, models, strict=True):
            ir.save(model, work.folder / file)
        for name in checkpoint.companions():
            refuse_pointer(checkpoint.folder / name)
            shutil.copyfile(checkpoint.folder / name, work.folder / name)
        source = _source(checkpoint, parameters, graphs.unused)
        said = len(work.notes)
        tokenizer = probe_tokenizer(work.folder, checkpoint.companions(), work.notes)
        if len(work.notes) == said:  # a tokenizer that does not load has no template, either
            work.notes += chat_notes(runtime.reader, work.folder, tokenizer)
    files = _graph_files(files_of, traced)
    graph = _graph(options, draft.fake, traced[0], files, max_length, chosen, data.size_bytes)
    manifest = _manifest(work, source, graph, data, tokenizer)
    manifest = _verify(graphs, manifest, runtime.replay)
    result, smoke = run_all(work, manifest, runtime.smoke, choosing.target)
    record = choosing.record(result) if choosing.target is not None else None
    manifest = manifest.model_copy(update={"target": record, "smoke": smoke})
    write_manifest(work.folder, manifest)
    return Summary(
        options.out,
        manifest,
        choosing.reason(graphs.way),
        graphs.passes,
        work.seconds,
        peak_rss_bytes(),
        tuple(dict.fromkeys(work.notes)),
    )


def _graph_files(files_of: list[Phase], traced: list[Traced]) -> tuple[GraphFile, ...]:
    """What the manifest says of each graph."""
    return tuple(
        GraphFile(
            file=file,
            phase=phase,
            sequence_length=length,
            nodes=len(list(t.model.graph)),
            inputs=t.inputs,
            outputs=t.outputs,
        )
        for (file, phase, length), t in zip(files_of, traced, strict=True)
    )


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ResourceError(
            f"{parent}: no space left: the package needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )


def _source(checkpoint: Checkpoint, parameters: int, unused: list[str]) -> Source:
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
        unused=tuple(unused),
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
    cache = sum(dtypes.size_bytes(state.dtype, state.shape) for state in traced.states)
    return Graph(
        files=files,
        states=traced.states,
        opsets=dict(traced.model.opset_imports),
        attention=chosen.name,
        appends_chunks=options.batch_size == 1 or chosen.appends_in_batches or not fake.probed.layers,
        precision=options.precision,
        batch_size=options.batch_size,
        max_length=max_length,
        rereads_at=fake.rereads_at,
        vocab_size=fake.vocab_size,
        weight_bytes=weight_bytes,
        cache_bytes=cache,
    )


def _manifest(work: Work, source: Source, graph: Graph, data: weights.DataFile, tokenizer: TokenizerKind) -> Manifest:
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


def _verify(graphs: Graphs, manifest: Manifest, replay: Replay) -> Manifest:
    """Replay the known answer, and return the manifest with the result. Raises ParityError when they differ."""
    draft, files_of = graphs.draft, graphs.phases
    work = draft.work
    if not work.options.verify:
        return manifest
    with stage(work.progress, "known answer", work.seconds):
        known_answer.save(draft.known_answer(files_of), work.folder)
        manifest = manifest.model_copy(update={"files": (*manifest.files, record_file(work.folder, KNOWN_ANSWER))})
    with stage(work.progress, "verify", work.seconds), opened_and_run(CPU):
        if work.options.computing.twin is not None:
            result = bf16_twin.replay(work.folder, manifest, [file for file, _, _ in files_of], replay)
        else:
            result = replay(work.folder, manifest)
    if result.status != "verified":
        with stage(work.progress, "look for cause", work.seconds):
            own = self_check.disagreement(draft.checkpoint, draft.known_answer(files_of))
        if own is not None:
            raise UnsupportedModelError(f"{work.options.checkpoint}: {own}; nothing was written")
        raise ParityError(
            f"{work.options.checkpoint}: the exported graph does not compute what the model computes: {result.detail}"
            f"{hint(graphs)}"
        )
    work.notes += [
        f"the known answer did not run {file}, whose chunk is longer than the prompt" for file in result.not_run
    ]
    return manifest.model_copy(update={"verification": result})


def hint(graphs: Graphs) -> str:
    """What is known to go wrong with a model like this one, and what to do, as the end of a sentence."""
    draft = graphs.draft
    if not draft.fake.probed.length_as_tensor:
        return (
            "; its code needs the number of cached tokens as a plain number, which a graph does not have, so that it "
            "cannot be exported yet; nothing was written"
        )
    if any(item.routed for item in graphs.traced) and draft.work.options.computing is not EXACT:
        return (
            " (rounding may make its router choose other experts; fp32 tells whether it is that); nothing was "
            "written, please report this model"
        )
    return "; nothing was written, please report this model"
