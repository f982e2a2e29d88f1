"""The export, stage by stage: describe, trace, choose a lowering, write, verify, publish.

Everything is written to a hidden folder next to the target and renamed at the end, so that a killed or failed export
leaves no package. The caller passes the functions that run a package, because this folder may not import the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from partita.dtypes import EXACT
from partita.errors import ParityError, PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint.companions import Reader, stop_tokens
from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.exporters import Attempts, Exported, ReadFolder, Work, add_note, native, optimum
from partita.export.options import (
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
from partita.export.publish import reserve
from partita.export.resolve import in_question, notes, resolve, with_activations
from partita.export.target import NodeSupport, Smoke, Target
from partita.export.verify.quality import OpenScorer
from partita.export.verify.smoke_run import (
    Locate,
    MismatchError,
    NotRunningError,
    Replay,
    RoundingParityError,
    Runtime,
    TargetParityError,
    WriteAdapter,
    nothing_runs,
)
from partita.export.weights.external_data import translate_space
from partita.export.writing import Summary, write

EXPORTERS: dict[str, Callable[[Checkpoint, Work, Target | None], Attempts]] = {
    "native": native.attempts,
    OPTIMUM: optimum.attempts,
}
Offer = Callable[[optimum.Refusal, Checkpoint, ExportOptions], optimum.Refusal]
"""Adds to the error for a model another way to export it."""
__all__ = ["ExportOptions", "Summary", "TargetParityError", "check_options", "export"]


def export(
    options: ExportOptions,
    *,
    replay: Replay,
    smoke: Smoke | None = None,
    reader: Reader | None = None,
    scorer: OpenScorer | None = None,
    target: Target | None = None,
    takes: NodeSupport | None = None,
    write_adapter: WriteAdapter | None = None,
    locate: Locate | None = None,
    progress: Progress | None = None,
    quality_text: Path | None = None,
    offer: Offer | None = None,
    read_folder: ReadFolder | None = None,
    asked: Asked | None = None,
) -> Summary:
    """Export a checkpoint to a package.

    `replay`, `smoke` and `scorer` run the package on the CPU provider; `takes` probes that provider without a `target`;
    `reader` reads files that only generate uses; `locate` finds the first difference of a wrong graph. Quality is
    measured with `scorer` on `options.quality_text`, else on `quality_text`. `offer` adds another exporter to the error
    for a model; `read_folder` reads the result of another exporter; `asked`: the options to record, where they differ
    from `options`. Raises a PartitaError; no partial package is left behind.
    """
    check_options(options)
    asked = asked_options(options) if asked is None else asked
    options = with_layout(options)
    with ExitStack() as cleanup:
        try:
            place = cleanup.enter_context(reserve(options.folder, options.read_paths, force=options.force))
        except OSError as error:
            raise ResourceError(f"{options.folder.parent}: cannot create a folder there ({error.strerror})") from error
        try:
            work = Work(options, progress or Silent(), place.folder, asked)
            work.notes, work.supports, work.cleanup = place.notes, takes, cleanup
            work.read_folder = read_folder
            runtime = Runtime(replay, smoke, reader, scorer, write_adapter, locate)
            summary = _run(work, runtime, target, quality_text, offer)
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


def _run(
    work: Work, runtime: Runtime, target: Target | None, quality_text: Path | None, offer: Offer | None
) -> Summary:
    with stage(work.progress, "read checkpoint", work.seconds):
        checkpoint = open_checkpoint(str(work.options.checkpoint), work.progress)
        max_length(work.options, checkpoint)
        stop_tokens(runtime.reader, checkpoint.folder)  # raises for a damaged file
    work.options = options = resolve(work.options, checkpoint, target, quality_text)
    for note in (*checkpoint.notes, *notes(options, checkpoint)):
        add_note(work, note)
    cache_rounding.ask(options, target)
    if options.exporter != OPTIMUM and in_question(options, target):
        with stage(work.progress, "probe target", work.seconds, of=options.precision):
            work.options = options = with_activations(options, target, work.notes.append)
    try:
        attempts = EXPORTERS[options.exporter](checkpoint, work, target)
        first = attempts.best()
    except UnsupportedModelError as error:
        raise error if offer is None else offer(error, checkpoint, options) from error
    try:
        return _first_that_runs(attempts, first, work, runtime)
    except ParityError as error:
        if offer is None or isinstance(error, TargetParityError):  # the graph is correct on the CPU provider
            raise
        raise offer(error, checkpoint, options) from error


def _first_that_runs(attempts: Attempts, exported: Exported | None, work: Work, runtime: Runtime) -> Summary:
    """Write the best variant that opens, runs and is verified. Raises the errors if there is none."""
    failed: list[NotRunningError | MismatchError] = []
    while exported is not None:
        try:
            return write(exported, work, runtime, attempts)
        except (NotRunningError, MismatchError) as error:
            failed.append(error)
            attempts.reject(exported, error.detail, ran=isinstance(error, MismatchError))
            work.notes.append(f"{exported.label} was tried and rejected: {error.detail}")
            _empty(work)
        exported = attempts.best()
    wrong = next((error for error in failed if isinstance(error, MismatchError)), None)
    if isinstance(wrong, RoundingParityError):
        raise RoundingParityError(f"{wrong}{_suggest_variant(attempts, work, runtime)}", wrong.detail) from wrong
    if wrong is not None:
        raise wrong
    stopped = [error for error in failed if isinstance(error, NotRunningError)]
    raise nothing_runs(
        str(work.options.checkpoint), stopped, attempts.rejections(), _suggest_variant(attempts, work, runtime)
    )


def _suggest_variant(attempts: Attempts, work: Work, runtime: Runtime) -> str:
    """The remedy for a requested variant that does not run, as the end of a sentence: others are tried."""
    for other in attempts.alternatives():
        try:
            exported = other.best()
            if exported is None:
                continue
            write(exported, work, runtime, other)
        except PartitaError:
            continue
        finally:
            _empty(work)
        if work.options.cache == WINDOW:  # has only one lowering
            return f"; omit `cache={WINDOW}`: {exported.label} runs there, and caches the whole length"
        return f"; {exported.label} runs there; `attention=auto` would choose it"
    precision = " or `precision`" if work.options.computing is not EXACT else ""
    kept = work.options.cache_precision
    rounded = "" if kept is None else f", or omit `cache_precision={kept}`, which only this lowering supports"
    return f"; choose another `target`{precision}{rounded}"


def _empty(work: Work) -> None:
    """Remove the files of rejected graphs."""
    for path in work.folder.iterdir():
        path.unlink()
