"""The graphs that an export would write, without weights: for `partita plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from partita.export.checkpoint.description import Checkpoint, has_weights, open_checkpoint, open_config
from partita.export.checkpoint.gguf.conversion import gguf_file
from partita.export.checkpoint.weight_files import TensorInfo
from partita.export.exporters import Exported, Work, native
from partita.export.options import check_options, max_length, with_layout
from partita.export.progress import stage
from partita.export.resolve import in_question, notes, resolve, with_activations
from partita.export.target import Target
from partita.export.trace.fake_model import build_fake_model


def planned_graphs(work: Work, target: Target | None) -> tuple[Checkpoint, Exported]:
    """The checkpoint, and the graphs that an export writes for `target`. No weights are read.

    Without weight files the shapes are those of the model that config.json describes. Raises UsageError,
    CheckpointError, UnsupportedModelError.
    """
    check_options(work.options)
    options = with_layout(work.options)
    given = str(options.checkpoint)
    with stage(work.progress, "read checkpoint", {}):
        if gguf_file(Path(given)) is not None or has_weights(Path(given)):
            checkpoint = open_checkpoint(given, work.progress)
            max_length(options, checkpoint)
        else:
            checkpoint = open_config(given, work.progress)
            fake = build_fake_model(checkpoint.config, options.computing.dtype, 1, max_length(options, checkpoint))
            named = fake.module.named_parameters()
            tensors = {name: TensorInfo(name, "", tuple(value.shape), "bfloat16") for name, value in named}
            checkpoint = replace(checkpoint, tensors=tensors)
    work.options = resolve(options, checkpoint, target, None)
    work.notes += [*checkpoint.notes, *notes(work.options, checkpoint)]
    if in_question(work.options, target):
        work.options = with_activations(work.options, target, work.notes.append)
    exported = native.attempts(checkpoint, work, target).best()
    assert exported is not None  # nothing was set aside
    return checkpoint, exported
