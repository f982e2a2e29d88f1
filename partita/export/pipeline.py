"""The export itself, stage by stage: describe, trace, choose a lowering, write, verify, publish.

Everything is written to a hidden folder next to the target and renamed at the end, the manifest last: a killed or
failed export leaves nothing that looks like a package. Replaying the known answer needs the runtime, which this folder
may not import: the caller passes a function.
"""

from __future__ import annotations

from contextlib import ExitStack

from partita.errors import ResourceError
from partita.export.checkpoint import open_checkpoint
from partita.export.choosing import Choosing, without_target
from partita.export.drafts import Draft, Work
from partita.export.fake_model import build_fake_model
from partita.export.options import PRECISIONS, ExportOptions, check_options, max_length
from partita.export.progress import Progress, Silent, stage
from partita.export.publish import reserve
from partita.export.target import Target
from partita.export.weights import translate_space
from partita.export.writing import Replay, Summary, TargetParityError, write

__all__ = ["ExportOptions", "Summary", "TargetParityError", "check_options", "export"]


def export(
    options: ExportOptions, *, replay: Replay, target: Target | None = None, progress: Progress | None = None
) -> Summary:
    """Export a checkpoint to a package, for `target` where there is one.

    Raises a PartitaError that names what is wrong; nothing that looks like a package is left behind.
    """
    check_options(options)
    with ExitStack() as cleanup:
        try:
            place = cleanup.enter_context(reserve(options.out, options.checkpoint, force=options.force))
        except OSError as error:
            raise ResourceError(f"{options.out.parent}: cannot make a folder there ({error.strerror})") from error
        try:
            work = Work(options, progress or Silent(), place.folder, notes=place.notes)
            summary = _run(work, replay, target)
            place.publish()
        except OSError as error:
            raise translate_space(error, place.folder) from error
        except MemoryError as error:
            raise ResourceError(
                f"{options.checkpoint}: memory ran out; a smaller --max-length or --batch-size needs less, and "
                "--no-verify does without the original model"
            ) from error
    return summary


def _run(work: Work, replay: Replay, target: Target | None) -> Summary:
    options = work.options
    with stage(work.progress, "read checkpoint", work.seconds):
        checkpoint = open_checkpoint(options.checkpoint)
        length = max_length(options, checkpoint)
    with stage(work.progress, "trace", work.seconds):
        fake = build_fake_model(checkpoint.config, PRECISIONS[options.precision], options.batch_size, length)
    draft = Draft(work, checkpoint, fake, length)
    if target is None:
        chosen, reason = without_target(options, fake)
        return write(draft.graphs(chosen.name), replay, reason, None)
    return _run_for(draft, replay, Choosing(draft, target, options.attention))


def _run_for(draft: Draft, replay: Replay, choosing: Choosing) -> Summary:
    """Write the best lowering that its target computes rightly. Raises TargetParityError when there is none."""
    failed: TargetParityError | None = None
    while (name := choosing.best()) is not None:
        try:
            return write(draft.graphs(name), replay, choosing.reason(name), choosing)
        except TargetParityError as error:
            failed = error
            choosing.disagrees[name] = error.detail
            draft.work.notes.append(f"--attention {name} was tried and left: {error.detail}")
            for path in draft.work.folder.iterdir():
                path.unlink()
    assert failed is not None
    raise failed
