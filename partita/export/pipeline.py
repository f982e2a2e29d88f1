"""The export, stage by stage: describe, trace, choose a lowering, write, verify, publish.

Everything is written to a hidden folder next to the target and renamed at the end, so that a killed or failed export
leaves no package. The caller passes the functions that run a package, because this folder may not import the runtime.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita import process
from partita.dtypes import EXACT
from partita.errors import ParityError, PartitaError, ProviderError, ResourceError, UnsupportedModelError
from partita.export import native, optimum
from partita.export.checkpoint.companions import stop_tokens
from partita.export.checkpoint.description import Checkpoint, has_weights, open_checkpoint, open_config
from partita.export.checkpoint.gguf.conversion import gguf_file
from partita.export.checkpoint.weight_files import unreadable
from partita.export.drafts import Exported
from partita.export.options import (
    AUTO,
    OPTIMUM,
    WINDOW,
    Asked,
    ExportOptions,
    asked_options,
    check_options,
    max_length,
    with_layout,
)
from partita.export.passes import cache_rounding
from partita.export.progress import Progress, Silent, stage
from partita.export.publish import ExportResult, reserve
from partita.export.target import Target, target_record
from partita.export.trace.attention import GROWING
from partita.export.trace.fake_model import build_fake_model
from partita.export.verify.package_runs import (
    NotRunningError,
    RejectedError,
    RoundingParityError,
    TargetParityError,
)
from partita.export.weights.external_data import translate_space
from partita.export.weights.origins import TensorInfo
from partita.export.work import Replay, Work, add_note, notes, resolve, with_activations
from partita.export.writing import write
from partita.package.folder import Manifest, record_file, write_manifest
from partita.package.records import TargetRecord

Offer = Callable[[optimum.Refusal, Checkpoint, ExportOptions], optimum.Refusal]
"""Adds to the error for a model another way to export it."""
__all__ = ["ExportOptions", "TargetParityError", "check_options", "export"]


def export(
    options: ExportOptions,
    *,
    replay: Replay,
    target: Target | None = None,
    progress: Progress | None = None,
    quality_text: Path | None = None,
    offer: Offer | None = None,
    asked: Asked | None = None,
    **functions: Any,
) -> ExportResult:
    """Export a checkpoint to a package.

    `replay` and `functions`: of the runtime, see `Work`. Quality is measured on `options.quality_text`, else on
    `quality_text`. `offer` adds another exporter to the error for a model; `asked`: the options to record, where they
    differ from `options`. Raises a PartitaError; no partial package is left behind.
    """
    check_options(options)
    asked = asked_options(options) if asked is None else asked
    options = with_layout(options)
    with ExitStack() as cleanup:
        if process.own_process:
            gc.freeze()  # the objects of the libraries, half a million, are not visited by each collection
            cleanup.callback(gc.unfreeze)
        try:
            place = cleanup.enter_context(reserve(options.folder, options.read_paths, force=options.force))
        except OSError as error:
            raise ResourceError(f"{options.folder.parent}: cannot create a folder there ({error.strerror})") from error
        try:
            work = Work(
                options,
                progress or Silent(),
                place.folder,
                asked,
                notes=place.notes,
                replay=replay,
                cleanup=cleanup,
                **functions,
            )
            summary = _run(work, target, quality_text, offer)
            place.publish()
        except OSError as error:
            raise translate_space(error, place.folder) from error
        except MemoryError as error:
            # A quantised package needs its quality measurement, and that the source model.
            skips = "" if options.quantises else ", or `verify=False` to skip the source model"
            raise ResourceError(
                f"{options.checkpoint}: out of memory; use a smaller `max_length` or `batch_size`{skips}"
            ) from error
    return summary


def _run(work: Work, target: Target | None, quality_text: Path | None, offer: Offer | None) -> ExportResult:
    with stage(work.progress, "read checkpoint", work.seconds):
        checkpoint = open_checkpoint(str(work.options.checkpoint), work.progress)
        max_length(work.options, checkpoint)
        stop_tokens(work.reader, checkpoint.folder)  # raises for a damaged file
    hashing = ThreadPoolExecutor(1)
    work.cleanup.callback(hashing.shutdown, cancel_futures=True)
    work.source_files = [hashing.submit(record_file, checkpoint.folder, name) for name in checkpoint.files]
    _resolve_options(work, checkpoint, target, quality_text)
    options = work.options
    try:
        if options.exporter == OPTIMUM:
            return _write_optimum(optimum.export_graph(checkpoint, work), target)
        variants = native.variants(checkpoint, work, target)
        first = variants.best()
    except UnsupportedModelError as error:
        raise error if offer is None else offer(error, checkpoint, options) from error
    try:
        return _first_that_runs(variants, first, work)
    except ParityError as error:
        if offer is None or isinstance(error, TargetParityError):  # the graph is correct on the CPU provider
            raise
        raise offer(error, checkpoint, options) from error


def _resolve_options(work: Work, checkpoint: Checkpoint, target: Target | None, quality_text: Path | None) -> None:
    """Set options whose default depends on checkpoint and target. Raises a PartitaError where one is rejected."""
    work.options = resolve(work.options, checkpoint, target, quality_text)
    for note in (*checkpoint.notes, *notes(work.options, checkpoint)):
        add_note(work, note)
    cache_rounding.ask(work.options, target)
    if work.options.exporter != OPTIMUM:
        work.options = with_activations(work.options, target, work.notes.append)


def planned_graphs(work: Work, target: Target | None) -> tuple[Checkpoint, Exported]:
    """The checkpoint, and the graphs that an export writes for `target`. No weights are read.

    Without weight files the shapes are those of the model that config.json describes. Raises UsageError,
    CheckpointError, UnsupportedModelError.
    """
    check_options(work.options)
    work.options = options = with_layout(work.options)
    given = str(options.checkpoint)
    with stage(work.progress, "read checkpoint", {}):
        try:
            is_checkpoint = gguf_file(Path(given)) is not None or has_weights(Path(given))
        except OSError as error:
            raise unreadable(error, Path(given)) from error
        if is_checkpoint:
            checkpoint = open_checkpoint(given, work.progress)
            max_length(options, checkpoint)
        else:
            checkpoint = open_config(given, work.progress)
            fake = build_fake_model(
                checkpoint.config, options.computing.dtype, 1, max_length(options, checkpoint), checkpoint.location
            )
            named = fake.module.named_parameters()
            tensors = {name: TensorInfo(name, Path(), tuple(value.shape), "bfloat16") for name, value in named}
            checkpoint = replace(checkpoint, tensors=tensors)
    _resolve_options(work, checkpoint, target, None)
    exported = native.variants(checkpoint, work, target).best()
    assert exported is not None  # nothing was rejected
    return checkpoint, exported


def _first_that_runs(variants: native.Variants, exported: Exported | None, work: Work) -> ExportResult:
    """Write the best variant that opens, runs and is verified. Raises the errors if there is none."""
    failed: list[RejectedError] = []
    while exported is not None:
        try:
            manifest, result = write(exported, variants.target)
            return _finish(exported, manifest, variants.record(result), variants.reason(exported))
        except RejectedError as error:
            failed.append(error)
            variants.reject(exported, error.detail, ran=isinstance(error, ParityError))
            work.notes.append(f"{exported.label} was tried and rejected: {error.detail}")
            for path in work.folder.iterdir():
                path.unlink()
        exported = variants.best()
    for each in failed:
        if isinstance(each, RoundingParityError | TargetParityError):
            raise each
    raise _not_running(work.options, variants.rejections(), failed)


def _write_optimum(exported: Exported, target: Target | None) -> ExportResult:
    """Write optimum's graph, which has no variants. Raises the errors of writing."""
    try:
        manifest, result = write(exported, target)
    except NotRunningError as error:
        raise _not_running(exported.work.options, [f"{OPTIMUM} {error.detail}"], [error]) from error
    record = target_record(target, result, how=f"{OPTIMUM} writes one graph")
    tools = ", ".join(f"{name} {version}" for name, version in manifest.toolchain.items() if OPTIMUM in name)
    return _finish(exported, manifest, record, f"exported by {tools}")


def _not_running(options: ExportOptions, reasons: Sequence[str], failed: Sequence[RejectedError]) -> PartitaError:
    """The error where no graph runs. `reasons`: the graphs with their reasons."""
    message = f"{options.checkpoint}: {'; '.join(reasons)}; nothing was written{_hint(options)}"
    if all(isinstance(error.__cause__, ProviderError) for error in failed):
        return ProviderError(message)
    return NotRunningError(message, failed[0].detail)


def _finish(exported: Exported, manifest: Manifest, target: TargetRecord | None, reason: str) -> ExportResult:
    """Write the manifest, the last file of a package. `reason`: for the attention and cache layout."""
    work, manifest = exported.work, manifest.model_copy(update={"target": target})
    write_manifest(work.folder, manifest)
    return ExportResult(
        work.options.folder,
        manifest,
        reason,
        {} if exported.graphs is None else dict(exported.graphs.passes),
        work.seconds,
        process.peak_rss_bytes(),
        tuple(dict.fromkeys(work.notes)),
    )


def _hint(options: ExportOptions) -> str:
    """The remedy where no variant runs, as the end of a sentence."""
    if options.cache == WINDOW:
        return f"; omit `cache={WINDOW}`, which only this lowering supports"
    if options.cache_precision is not None:
        return f"; omit `cache_precision={options.cache_precision}`, which only this lowering supports"
    if options.attention not in (AUTO, GROWING):
        return "; `attention=auto` tries the other lowerings"
    precision = "" if options.computing is EXACT else " or `precision`"
    return f"; choose another `target`{precision}"
