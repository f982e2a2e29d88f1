"""What Partita's own exporter refuses, or writes otherwise than the model computes, may be exported by optimum: its
environment is asked, and the error says so.
"""

from __future__ import annotations

from partita.errors import ParityError, PartitaError, UnsupportedModelError
from partita.export.checkpoint import Checkpoint
from partita.export.optimum.environment import MAKE, find
from partita.export.options import ExportOptions
from partita.remedies import Remedy

USE = Remedy("optimum's exporter covers the type; use it with", options=("--exporter", "optimum"))
MAY = Remedy("exporter optimum may cover the type, once its environment is made by", MAKE.command)


Refusal = UnsupportedModelError | ParityError


def offered(error: Refusal, checkpoint: Checkpoint, options: ExportOptions) -> Refusal:
    """The refusal of a model, or that its graph is another than it, with optimum as the remedy, where that may help;
    else the error as it is.
    """
    if options.exporter != "native" or error.remedy is not None or options.computing.bits is not None:
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
