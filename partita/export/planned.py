"""The graphs that an export would write, without weights: for `partita plan`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from partita.export.checkpoint.description import Checkpoint, has_weights, open_checkpoint, open_config
from partita.export.checkpoint.gguf.conversion import gguf_file
from partita.export.checkpoint.weight_files import TensorInfo
from partita.export.exporters import native
from partita.export.options import ExportOptions, check_options, most_positions, with_layout
from partita.export.options import max_length as chosen_length
from partita.export.progress import Progress, stage
from partita.export.resolve import in_question, notes, resolve, with_activations
from partita.export.target import NodeSupport, Target, skeleton
from partita.export.trace.fake_model import build_fake_model
from partita.export.work import Work
from partita.package.contract import Contract

CONFIG_TYPE = "bfloat16"
"""Type of the weights of a config without files."""


@dataclass(frozen=True, slots=True)
class PlannedGraphs:
    """The graphs of an export that wrote nothing."""

    contract: Contract
    models: tuple[bytes, ...]
    """One per file of the contract, serialised, without weights."""
    from_config: bool
    """There are no weight files: shapes are those of the model."""
    model_type: str
    parameters: int
    precision: str
    attention: str
    most_positions: int | None
    """The model's maximum length; None without one."""
    notes: tuple[str, ...]


def planned_graphs(
    options: ExportOptions, target: Target | None, takes: NodeSupport, progress: Progress, scratch: Path
) -> PlannedGraphs:
    """The graphs that an export with these options writes for `target`. No weights are read.

    `takes` probes the CPU provider without a target. Raises UsageError, CheckpointError, UnsupportedModelError.
    """
    check_options(options)
    options = with_layout(options)
    given = str(options.checkpoint)
    with stage(progress, "read checkpoint", {}), ExitStack() as cleanup:
        from_config = not (gguf_file(Path(given)) is not None or has_weights(Path(given)))
        checkpoint = open_config(given, progress) if from_config else open_checkpoint(given, progress)
        length = chosen_length(options, checkpoint)
        if from_config:
            checkpoint = _with_tensors(checkpoint, options, length)
    options = resolve(options, checkpoint, target, None)
    work = Work(options, progress, scratch, cleanup=cleanup)
    work.supports = takes
    work.notes += [*checkpoint.notes, *notes(options, checkpoint)]
    if in_question(options, target):
        work.options = with_activations(options, target, work.notes.append)
    exported = native.attempts(checkpoint, work, target).best()
    assert exported is not None  # nothing was set aside
    return PlannedGraphs(
        contract=exported.contract,
        models=tuple(skeleton(model) for model in exported.models),
        from_config=from_config,
        model_type=checkpoint.model_type,
        parameters=exported.parameters,
        precision=work.options.precision,
        attention=exported.attention,
        most_positions=most_positions(checkpoint),
        notes=tuple(work.notes),
    )


def _with_tensors(checkpoint: Checkpoint, options: ExportOptions, length: int) -> Checkpoint:
    """The checkpoint with the parameters of its model as tensors without a file."""
    fake = build_fake_model(checkpoint.config, options.computing.dtype, 1, length)
    named = fake.module.named_parameters()
    tensors = {name: TensorInfo(name, "", tuple(value.shape), CONFIG_TYPE) for name, value in named}
    return replace(checkpoint, tensors=tensors)
