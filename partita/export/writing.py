"""Write a package into the work folder, and verify it on the CPU provider and the target."""

from __future__ import annotations

import datetime
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

import partita
from partita.errors import GenerationError, ParityError, PartitaError, ResourceError, UnsupportedModelError
from partita.export import resolve
from partita.export.checkpoint.companions import GENERATION, probe_tokenizer, stop_notes, write_generation
from partita.export.checkpoint.config_values import without_overridden_settings
from partita.export.checkpoint.description import Checkpoint, source_files
from partita.export.checkpoint.weight_files import refuse_pointer
from partita.export.exporters import Attempts, Exported, Work, add_note
from partita.export.options import ExportOptions
from partita.export.passes import cache_rounding
from partita.export.progress import stage
from partita.export.publish import ExportResult
from partita.export.verify import changed_copy, known_answer, quality, self_check
from partita.export.verify.known_answer import KnownAnswer
from partita.export.verify.quality import SourceLogits
from partita.export.verify.smoke_run import CPU, RoundingParityError, opened_and_run, run_all, run_on_cpu
from partita.export.verify.texts import Text
from partita.export.weights import external_data as weights
from partita.export.weights import memory_map
from partita.observations.text_format import human_bytes
from partita.options.fields import path_of
from partita.package.contract import state_bytes
from partita.package.folder import (
    KNOWN_ANSWER,
    QUALITY,
    WEIGHTS,
    FileRecord,
    Manifest,
    Source,
    TokenizerKind,
    adapter_file,
    answer_file,
    linked_sha256,
    record_file,
    sha256_of,
    write_manifest,
)
from partita.package.records import Verification
from partita.process import peak_rss_bytes

Result = TypeVar("Result")
TOOLS = ("partita", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy", "tokenizers")
SAME_TEXT = (
    "quality is measured on the text of `calibrate`, so its figures are better than on other text; set another one "
    "with `quality_text`"
)


def write(exported: Exported, work: Work, attempts: Attempts) -> ExportResult:
    """Write the package into the work folder, run and verify it. Raises ParityError, NotRunningError."""
    checkpoint, graph, options = exported.checkpoint, exported.graph, work.options
    text = _quality_text(exported, work)
    source_logits = _source_logits(text, exported, work)
    rounded = _rounded_parameters(exported)  # one byte each, until they are written
    if options.verify:
        held = memory_map.resident_parameters(checkpoint.tensors, work.scratch, graph.weight_bytes)
        cache = state_bytes(graph.states, options.computing.cpu_dtype)
        # where the logits of the text do not fit on disk, package and source model are in memory together
        packed_twice = 0 if source_logits is None or source_logits.fits else 2 * graph.weight_bytes
        known_answer.check_memory(held, cache, packed_twice, needed=options.quantises)
    parent, needed = options.folder.parent, graph.weight_bytes + rounded
    if needed > (free := shutil.disk_usage(parent).free):
        raise ResourceError(
            f"{parent}: no space left: the package needs {human_bytes(needed)}, but {human_bytes(int(free))} are free"
        )
    with (
        _calibrate_weights(exported, work) as exported,
        stage(work.progress, "write weights", work.seconds, graph.weight_bytes) as current,
    ):
        data = weights.write_data(exported.models, work.folder, current)
    with stage(work.progress, "write graph", work.seconds):
        for file, model in zip(graph.files, exported.models, strict=True):
            ir.save(model, work.folder / file.file)
        for name in checkpoint.companions():
            refuse_pointer(checkpoint.folder / name)
            shutil.copyfile(checkpoint.folder / name, work.folder / name)
        if (config := without_overridden_settings(checkpoint.folder)) is not None:
            (work.folder / "config.json").write_text(config, encoding="utf-8")
        if GENERATION not in checkpoint.companions():
            write_generation(checkpoint.config, work.folder)
        work.notes += stop_notes(work.reader, work.folder, graph.vocab_size)
        source = _source(checkpoint, options, exported)
        for each in exported.switched:
            assert work.write_adapter is not None
            work.write_adapter(work.folder / adapter_file(each.record.name), each.parameters())
        tokenizer = probe_tokenizer(work.folder, checkpoint.companions(), work.notes)
    found = None if exported.packed is None else exported.packed.calibration
    if found is not None and text is not None and found.text_sha256 == text.sha256:
        add_note(work, SAME_TEXT)
    manifest = _manifest(exported, work, source, data, tokenizer)
    manifest = _verify(exported, work, manifest)
    if options.cache_precision is not None and work.scorer is not None:
        with stage(work.progress, "round cache", work.seconds) as current:
            chosen = "quality-text" in work.recorded_options
            words = cache_rounding.read_text(options, checkpoint, manifest, chosen=chosen)
            manifest = cache_rounding.apply(work.folder, manifest, words, work.scorer, current)
    measured = text is not None
    manifest, (result, smoke) = _run(work, manifest, lambda m: run_all(work, m, attempts.target, measured=measured))
    manifest = _with_quality(exported, work, manifest, text)
    _refuse_ratio(work, manifest)
    manifest = manifest.model_copy(update={"target": attempts.record(result), "smoke": smoke})
    write_manifest(work.folder, manifest)
    return ExportResult(
        options.folder,
        manifest,
        attempts.reason(exported),
        dict(exported.passes),
        work.seconds,
        peak_rss_bytes(),
        tuple(dict.fromkeys(work.notes)),
    )


def _rounded_parameters(exported: Exported) -> int:
    """Number of weights that are calibrated; 0 without calibration."""
    if exported.calibrate is None or exported.packed is None:
        return 0
    return sum(kind.parameters for kind in exported.packed.kinds)


@contextmanager
def _calibrate_weights(exported: Exported, work: Work) -> Iterator[Exported]:
    """The export with calibrated weights, where there is a calibration, while they are written."""
    if exported.calibrate is None or exported.packed is None:
        yield exported
        return
    size = _rounded_parameters(exported)
    with tempfile.TemporaryDirectory(dir=work.folder.parent, prefix=f"{work.folder.name}-rounded-") as name:
        with stage(work.progress, "calibrate", work.seconds, size, "weights") as current:
            found, kinds = exported.calibrate(Path(name), current)
        if found.not_calibrated:
            add_note(work, f"not calibrated: {', '.join(found.not_calibrated)}")
        yield replace(exported, packed=exported.packed.model_copy(update={"calibration": found, "kinds": kinds}))


def _quality_text(exported: Exported, work: Work) -> Text | None:
    """The text for the quality measurement, read before anything is written; None without a measurement."""
    path, graph = path_of(work.options.quality_text), exported.graph
    if work.scorer is None or not work.options.measures or path is None:
        return None
    return quality.read_text(
        path,
        exported.checkpoint,
        graph.vocab_size,
        graph.max_length,
        quality.measured_tokens(work.options, exported.original_parameters),
        partial(add_note, work),
        chosen="quality-text" in work.recorded_options,
    )


def _source_logits(text: Text | None, exported: Exported, work: Work) -> SourceLogits | None:
    """The file for the source model's logits on the text, kept for later attempts; None without a text."""
    if text is not None and work.source_logits is None:
        work.source_logits = SourceLogits(text, exported.graph.vocab_size, work.scratch)
        work.cleanup.callback(work.source_logits.close)
    return work.source_logits


def _with_quality(exported: Exported, work: Work, manifest: Manifest, text: Text | None) -> Manifest:
    """The manifest with the quality, where anything is rounded."""
    scorer, source, variant = work.scorer, _source_logits(text, exported, work), None
    if text is None or scorer is None or source is None:
        return manifest
    if work.options.computing.cpu_dtype is not None:
        scorer, variant = changed_copy.scoring(scorer), changed_copy.WIDE_DETAIL
    tokens = source.tokens * (1 if source.is_complete else 2)
    with stage(work.progress, "quality", work.seconds, tokens, "tokens") as current:
        try:
            found = quality.measure(
                exported.checkpoint, text, work.folder, manifest, scorer, current, source, work.scratch, variant
            )
        except (PartitaError, RuntimeError, ValueError) as error:
            if not isinstance(error, ResourceError):
                run_on_cpu(work, manifest)  # raises where the graph fails on any text
            if not isinstance(error, GenerationError):
                raise
            raise UnsupportedModelError(
                f"{work.options.checkpoint}: {work.options.precision} fails on {text.name}, the text for measuring "
                f"quality: {error}; nothing was written; choose another `precision`, e.g. bf16 or fp32",
                option="precision",
            ) from error
    files = (*manifest.files, record_file(work.folder, QUALITY))
    return manifest.model_copy(update={"files": files, "quality": found})


def _refuse_ratio(work: Work, manifest: Manifest) -> None:
    """Raise ParityError when the package diverges from the source model by more than allowed."""
    allowed, found = work.options.max_perplexity_ratio, manifest.quality
    if allowed is None or found is None or found.perplexity_ratio <= allowed:
        return
    within = "" if work.options.max_weight_size is None else " within `max_weight_size`"
    raise ParityError(
        f"{work.options.checkpoint}: `max_perplexity_ratio={allowed}` is not met{within}: the package has "
        f"{found.perplexity_ratio:.4f} with {human_bytes(manifest.graph.weight_bytes)} of weights; nothing was "
        "published; search with a smaller `max_perplexity_ratio`, or choose another `precision`, e.g. fp16"
    )


def _source(checkpoint: Checkpoint, options: ExportOptions, exported: Exported) -> Source:
    files = tuple(
        FileRecord(name=name, size_bytes=size, sha256=linked_sha256(path) or sha256_of(path))
        for name, size in source_files(checkpoint)
        for path in [checkpoint.folder / name]
    )
    return Source(
        checkpoint=checkpoint.source_name,
        model_type=checkpoint.model_type,
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype,
        parameters=exported.parameters,
        files=files,
        unused=exported.unused,
        quantised=resolve.source_of(options, checkpoint),
    )


def _manifest(
    exported: Exported, work: Work, source: Source, data: weights.DataFile, tokenizer: TokenizerKind
) -> Manifest:
    files = [FileRecord(name=WEIGHTS, size_bytes=data.size_bytes, sha256=data.sha256)]
    files += [record_file(work.folder, p.name) for p in sorted(work.folder.iterdir()) if p.name != WEIGHTS]
    return Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source,
        graph=exported.graph.model_copy(update={"weight_bytes": data.size_bytes}),
        files=tuple(files),
        tokenizer=tokenizer,
        toolchain={**_toolchain(), **exported.tools},
        options=dict(work.recorded_options),
        verification=Verification(status="unverified", detail="exported with `verify=False`"),
        packed=exported.packed,
        prefill=exported.prefill,
        half_precision=exported.half_weights,
        adapters=(
            *exported.adapters,
            *(e.record.model_copy(update={"file": adapter_file(e.record.name)}) for e in exported.switched),
        ),
    )


def _run(
    work: Work, manifest: Manifest, run: Callable[[Manifest], Result], agrees: Callable[[Result], bool] = lambda _: True
) -> tuple[Manifest, Result]:
    """The result of `run`, and the manifest it used: for full batches only, where smaller ones fail or mismatch."""
    try:
        result = run(manifest)
        if agrees(result) or not manifest.graph.symbolic_batch:
            return manifest, result
    except Exception:
        if not manifest.graph.symbolic_batch:
            raise
    whole = manifest.model_copy(update={"graph": manifest.graph.model_copy(update={"symbolic_batch": False})})
    result = run(whole)
    if agrees(result):
        add_note(
            work, "its graphs run only for the whole batch, so a prompt is prefilled together with the other sequences"
        )
    return whole, result


def _with_known_answers(exported: Exported, work: Work, manifest: Manifest) -> Manifest:
    """The manifest with the saved known answer, and one per switchable adapter."""
    names = [KNOWN_ANSWER]
    for each in exported.switched:
        names.append(answer_file(each.record.name))
        known_answer.save(each.known_answer(), work.folder, names[-1])
    adapters = tuple(
        record if record.merged else record.model_copy(update={"known_answer": answer_file(record.name)})
        for record in manifest.adapters
    )
    files = (*manifest.files, *(record_file(work.folder, name) for name in names))
    return manifest.model_copy(update={"files": files, "adapters": adapters})


def _toolchain() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = partita.__version__ if name == "partita" else "not an installed package"
    return versions


def _verify(exported: Exported, work: Work, manifest: Manifest) -> Manifest:
    """Replay the known answer, and return the manifest with the result. Raises ParityError on a mismatch."""
    if not work.options.verify:
        return manifest
    computing, replay = work.options.computing, work.replay
    assert replay is not None
    source = work.source_logits
    if source is not None and (source.is_complete or not source.fits):
        source = None
    tokens = None if source is None else source.tokens
    with stage(work.progress, "known answer", work.seconds, tokens, "tokens") as current:
        answer = exported.known_answer(None if source is None else partial(source.fill, start=0, stage=current))
        known_answer.save(answer, work.folder)
        manifest = _with_known_answers(exported, work, manifest)

    def replayed(manifest: Manifest) -> Verification:
        rounded = partial(self_check.of_rounded_weights, exported.checkpoint, answer, computing, work.scratch)
        if computing.cpu_dtype is not None:
            return changed_copy.replay_wide(work.folder, manifest, replay, rounded)
        if computing.bits is not None:
            return changed_copy.replay_exact(work.folder, manifest, replay)
        if self_check.computes_in_half_precision(computing):
            return changed_copy.verify_with_copy(work.folder, manifest, replay, rounded)
        return replay(work.folder, manifest)

    with stage(work.progress, "verify", work.seconds), opened_and_run(CPU, work.folder):
        manifest, result = _run(work, manifest, replayed, lambda result: result.status == "verified")
    if result.status != "verified":
        with stage(work.progress, "look for cause", work.seconds):
            raise _other_results(exported, work, answer, result, partial(_locate, exported, work, manifest))
    return manifest.model_copy(update={"verification": result})


def _locate(exported: Exported, work: Work, manifest: Manifest) -> str:
    """Where a wrong graph first differs from the source model, as the end of a sentence."""
    if work.locate is None or work.options.computing.cpu_dtype is not None:
        return ""  # the CPU provider does not run the package
    return f"; {work.locate(work.folder, manifest, exported.checkpoint)}"


def _other_results(
    exported: Exported, work: Work, answer: KnownAnswer, result: Verification, locate: Callable[[], str]
) -> PartitaError:
    """The error for a graph with wrong results, with its cause as far as experiments show it."""
    where = work.options.checkpoint
    own = self_check.disagreement(exported.checkpoint, answer, work.scratch)
    if own is not None:
        return UnsupportedModelError(f"{where}: {own}; nothing was written")
    seen = max((step.max_rel_error for step in result.steps), default=0.0)
    rounded = self_check.rounding(exported.checkpoint, answer, work.options.computing, seen, work.scratch)
    message = f"{where}: the exported graph does not match the source model: {result.detail}"
    if rounded is not None:
        return ParityError(f"{message}; {rounded}; nothing was written; choose another `precision`, e.g. fp32")
    message = f"{message}{locate()}{exported.caution}"
    is_rounded = self_check.computes_in_half_precision(work.options.computing)
    return RoundingParityError(message, result.detail) if is_rounded else ParityError(message)
