"""Every exception that Partita raises on purpose, and the exit code each one ends with.

    PartitaError                    1   anything we can explain
    ├── UsageError                  2   an option value that makes no sense
    ├── CheckpointError             1   the checkpoint is missing, damaged or inconsistent
    │   └── UnsupportedModelError   1   a model this exporter refuses, with the reason
    ├── PackageError                1   the package on disk is missing, damaged or from a newer Partita
    ├── ReportError                 1   a report file is missing, damaged or from a newer Partita
    ├── ResourceError               1   not enough memory or disk space
    ├── InstallationError           1   a library is not installed, or does not load
    ├── GenerationError             1   the run cannot go on (prompt too long, NaN logits, bad token id)
    ├── ProviderError               3   the provider chain was not honoured
    ├── ParityError                 4   the exported graph does not compute what its model computes
    └── ReportCheckError            5   a report does not meet the limits it was checked against

The message is one line: what is wrong, where, and what to do; the last as a `Remedy` where it is a command. A foreign
exception is translated at one boundary and kept as ``__cause__``; ``--debug`` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partita.remedies import Remedy

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""


class PartitaError(Exception):
    """Anything Partita can explain to its user. ``exit_code`` is what the command line ends with.

    `remedy`: what to do about it, which ends the message; None where the message says so itself, or nothing helps.
    `problem`: the message without it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: Remedy | None = None) -> None:
        super().__init__(message if remedy is None else f"{message}; {remedy}")
        self.problem, self.remedy = message, remedy


class UsageError(PartitaError):
    """An option or argument whose value makes no sense."""

    exit_code: ClassVar[int] = 2


class CheckpointError(PartitaError):
    """The checkpoint is missing, damaged or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its model cannot be exported; the message names the reason."""


class PackageError(PartitaError):
    """The package is missing, damaged, altered, or written by a newer Partita."""


class ReportError(PartitaError):
    """The report file is missing, damaged, or written by a newer Partita."""


class ResourceError(PartitaError):
    """Memory or disk space is not enough for what was asked."""


class InstallationError(PartitaError):
    """A library that is needed is not installed, or does not load; the message has the command that mends it."""


class GenerationError(PartitaError):
    """The generation loop cannot start or go on."""


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that would not run on the providers of a chain."""

    node: str
    """Empty when it has no name."""
    op_type: str | None
    module: str | None
    wanted: str
    """The provider that its user wanted most, by ONNX Runtime's name."""
    provider: str
    """The one that would take it."""
    reason: str
    """A reason code."""
    evidence_kind: str
    evidence: str
    remedy: str


class ProviderError(PartitaError):
    """The provider chain could not be honoured. `nodes`: those that would leave it, in execution order, where nodes are
    the cause.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, remedy: Remedy | None = None, nodes: tuple[RefusedNode, ...] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.nodes = nodes


class ParityError(PartitaError):
    """The exported graph does not compute what its model computes."""

    exit_code: ClassVar[int] = 4


class ReportCheckError(PartitaError):
    """A report does not meet the limits it was checked against."""

    exit_code: ClassVar[int] = 5


def public_type(error: Exception) -> str:
    """Name of the nearest class of this file, which everyone knows. Raises StopIteration for an error that is none."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
