"""The export itself, stage by stage: describe, trace, choose a lowering, write, verify, publish.

Everything is written to a hidden folder next to the target and renamed at the end, the manifest last: a killed or
failed export leaves nothing that looks like a package. Running what was written needs the runtime, which this folder
may not import: the caller passes functions.
"""

from __future__ import annotations

from contextlib import ExitStack

from partita.dtypes import EXACT
from partita.errors import PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint import open_checkpoint
from partita.export.choosing import Choices, Choosing, Unasked
from partita.export.companions import Reader, beyond_vocabulary, stop_tokens
from partita.export.config_values import named
from partita.export.drafts import Draft, Work
from partita.export.fake_model import build_fake_model
from partita.export.options import ExportOptions, check_options, max_length
from partita.export.progress import Progress, Silent, stage
from partita.export.publish import reserve
from partita.export.running import NotRunningError, Replay, Runtime, TargetParityError, nothing_runs
from partita.export.target import Smoke, Target
from partita.export.ties import untie
from partita.export.ways import AUTO, every_way
from partita.export.weights import translate_space
from partita.export.writing import Summary, write

__all__ = ["ExportOptions", "Summary", "TargetParityError", "check_options", "export"]


def export(
    options: ExportOptions,
    *,
    replay: Replay,
    smoke: Smoke | None = None,
    reader: Reader | None = None,
    target: Target | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Export a checkpoint to a package, for `target` where there is one.

    `replay` and `smoke` run what was written on the CPU provider, `reader` reads what only generate reads. Raises a
    PartitaError that names what is wrong; nothing that looks like a package is left behind.
    """
    check_options(options)
    with ExitStack() as cleanup:
        try:
            place = cleanup.enter_context(reserve(options.out, options.checkpoint, force=options.force))
        except OSError as error:
            raise ResourceError(f"{options.out.parent}: cannot make a folder there ({error.strerror})") from error
        try:
            work = Work(options, progress or Silent(), place.folder, notes=place.notes)
            summary = _run(work, Runtime(replay, smoke, reader), target)
            place.publish()
        except OSError as error:
            raise translate_space(error, place.folder) from error
        except MemoryError as error:
            raise ResourceError(
                f"{options.checkpoint}: memory ran out; a smaller --max-length or --batch-size needs less, and "
                "--no-verify does without the original model"
            ) from error
    return summary


def _run(work: Work, runtime: Runtime, target: Target | None) -> Summary:
    options = work.options
    with stage(work.progress, "read checkpoint", work.seconds):
        checkpoint = open_checkpoint(options.checkpoint)
        length = max_length(options, checkpoint)
        stops = stop_tokens(runtime.reader, checkpoint.folder)
    with stage(work.progress, "build model", work.seconds):
        try:
            fake = build_fake_model(checkpoint.config, options.computing.dtype, options.batch_size, length)
        except UnsupportedModelError as error:
            raise named(error, checkpoint.folder, checkpoint.config) from error
        work.notes += [*untie(fake, checkpoint), *beyond_vocabulary(stops, fake.vocab_size)]
    draft = Draft(work, checkpoint, fake, length, target)
    choosing = Unasked(draft, options.attention) if target is None else Choosing(draft, target, options.attention)
    return _first_that_runs(draft, runtime, choosing)


def _first_that_runs(draft: Draft, runtime: Runtime, choosing: Choices) -> Summary:
    """Write the best lowering that opens, runs, and computes what it should. Raises what was wrong if there is none."""
    failed: list[NotRunningError | TargetParityError] = []
    while (way := choosing.best()) is not None:
        try:
            return write(draft.graphs(way), runtime, choosing)
        except (NotRunningError, TargetParityError) as error:
            failed.append(error)
            choosing.set_aside(way, error.detail, ran=isinstance(error, TargetParityError))
            draft.work.notes.append(f"--attention {way} was tried and left: {error.detail}")
            _empty(draft)
    wrong = next((error for error in failed if isinstance(error, TargetParityError)), None)
    if wrong is not None:
        raise wrong
    stopped = [error for error in failed if isinstance(error, NotRunningError)]
    raise nothing_runs(draft.work.options.checkpoint, stopped, choosing.left_out(), _instead(draft, runtime, choosing))


def _instead(draft: Draft, runtime: Runtime, choosing: Choices) -> str:
    """What to do about a lowering that was asked for and does not run, as the end of a sentence: others are tried."""
    others = [] if choosing.wanted == AUTO else [way for way in every_way() if way.attention != choosing.wanted]
    for way in others:
        try:
            write(draft.graphs(way), runtime, choosing.instead(way))
        except PartitaError:
            continue
        finally:
            _empty(draft)
        return f"; --attention {way} runs there, and --attention auto finds it"
    return "; name another --target" + (" or --precision" if draft.work.options.computing is not EXACT else "")


def _empty(draft: Draft) -> None:
    """Remove what was written of a lowering that is not taken."""
    for path in draft.work.folder.iterdir():
        path.unlink()
