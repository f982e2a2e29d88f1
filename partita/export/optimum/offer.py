"""What Partita's own exporter refuses, or writes otherwise than the model computes, may be exported by optimum: its
environment is asked, and the error says so.

It is not offered where the model itself is not what is refused: the error names the option that it comes of, or what
was asked for is nothing that optimum does. How attention is written is no such thing: it was asked of our own graph.
"""

from __future__ import annotations

from dataclasses import replace

from partita.errors import ParityError, PartitaError, UnsupportedModelError, UsageError
from partita.export.checkpoint.description import Checkpoint
from partita.export.exporters import exporter, refuse_unable
from partita.export.optimum.environment import MAKE, find
from partita.export.options import AUTO, ExportOptions
from partita.remedies import Remedy

OPTIMUM = "optimum"
"""Its name among the exporters."""
USE = Remedy("optimum's exporter covers the type; use it with", options=("--exporter", "optimum"))
MAY = replace(MAKE, text=f"exporter optimum may cover the type; to use it, {MAKE.text}")


Refusal = UnsupportedModelError | ParityError


def offered(error: Refusal, checkpoint: Checkpoint, options: ExportOptions) -> Refusal:
    """The refusal of a model, or that its graph is another than it, with optimum as the remedy, where that may help;
    else the error as it is.
    """
    if options.exporter != "native" or error.remedy is not None or not _may_help(error, checkpoint, options):
        return error
    there = find()
    if there is None:
        remedy = MAY
    else:
        try:
            if not there.covers(checkpoint.model_type):
                return error
        except PartitaError:  # the environment is damaged: what is wrong with the model is the news
            return error
        remedy = USE
    return type(error)(error.said, where=error.where, remedy=remedy)


def _may_help(error: Refusal, checkpoint: Checkpoint, options: ExportOptions) -> bool:
    """Whether the model is what is refused, and optimum does what else was asked for."""
    if isinstance(error, UnsupportedModelError) and error.option is not None:
        return False
    if checkpoint.file is not None:  # a GGUF file, which it does not read
        return False
    other = exporter(OPTIMUM)
    asked = replace(options, exporter=OPTIMUM, attention=AUTO)
    try:
        refuse_unable(other, asked, checkpoint.quantised)
        other.check(asked)
    except UsageError:
        return False
    return True
