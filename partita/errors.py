"""Every exception that Partita raises on purpose; `exit_code` is that of the command line.

The message is one line: what is wrong, where, and what to do; the last as a `Remedy` where it is a command. A foreign
exception is translated at one boundary and kept as `__cause__`; `--debug` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.remedies import Remedy

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
LONGEST = 4000
"""Characters of a message."""


class PartitaError(Exception):
    """Anything Partita can explain to its user. ``exit_code`` is what the command line ends with.

    `said`: what is wrong. `where`: the file or folder it is about, which begins the message. `remedy`: what to do about
    it, which ends the message; None where the message says so itself, or nothing helps. `problem`: the message without
    the remedy.
    """

    exit_code: int = 1

    def __init__(self, said: str, *, where: Path | None = None, remedy: Remedy | None = None) -> None:
        if len(said) > LONGEST:
            said = f"{said[:LONGEST]}... ({len(said) - LONGEST:,} more characters)"
        self.said, self.where, self.remedy = said, where, remedy
        self.problem = said if where is None else f"{where}: {said}"
        help_text = "" if remedy is None else str(remedy)
        super().__init__(f"{self.problem}; {help_text}" if help_text else self.problem)

    def prefix(self, said: str) -> None:
        """Put `said` in front of the message."""
        self.problem = f"{said}; {self.problem}"
        self.args = (f"{said}; {self.args[0]}", *self.args[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled as a call of its class with `args`, the message, and some take more than that: one
        # that cannot be read back breaks a pool of processes, which then tells nothing of it.
        return _read_back, (type(self), self.args, self.__dict__)


def _read_back(kind: type[PartitaError], args: tuple[Any, ...], fields: dict[str, Any]) -> PartitaError:
    """An error that was pickled or copied, with all that it had."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class UsageError(PartitaError):
    """An option or argument whose value makes no sense."""

    exit_code = 2


class CheckpointError(PartitaError):
    """The checkpoint is missing, damaged or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its model cannot be exported; the message names the reason.

    `option`: the argument that it comes of, by its name in Python, so that the model may be exported without it; None
    where it comes of the model.
    """

    def __init__(
        self, said: str, *, where: Path | None = None, remedy: Remedy | None = None, option: str | None = None
    ) -> None:
        super().__init__(said, where=where, remedy=remedy)
        self.option = option


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
class Refusing:
    """A provider of a chain that does not run a node, and why."""

    provider: str
    """ONNX Runtime's name."""
    reason: str
    """A reason code."""
    evidence_kind: str
    evidence: str
    remedy: str
    available: bool = True
    """It is there and was asked; else the reason is the same for every node, and says nothing of this one."""


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that would not run on the providers of a chain."""

    node: str
    """Empty when it has no name."""
    op_type: str | None
    module: str | None
    wanted: str
    """The preferred provider, by ONNX Runtime's name."""
    provider: str
    """The one that would take it."""
    reason: str
    """A reason code."""
    evidence_kind: str
    evidence: str
    remedy: str
    available: bool = True
    """Whether the preferred provider is there at all; else the reason is the same for every node."""
    skipped: tuple[Refusing, ...] = ()
    """The other providers of the chain, in order."""

    @property
    def refusing(self) -> tuple[Refusing, ...]:
        """Every provider of the chain, in order, and why it does not run the node."""
        first = Refusing(self.wanted, self.reason, self.evidence_kind, self.evidence, self.remedy, self.available)
        return (first, *self.skipped)

    @property
    def asked(self) -> tuple[Refusing, ...]:
        """Those that are there; the first where none is."""
        return tuple(entry for entry in self.refusing if entry.available) or self.refusing[:1]


class ProviderError(PartitaError):
    """The provider chain could not be honoured. `nodes`: those that would leave it, in execution order, where nodes are
    the cause.
    """

    exit_code = 3

    def __init__(
        self,
        said: str,
        *,
        where: Path | None = None,
        remedy: Remedy | None = None,
        nodes: tuple[RefusedNode, ...] = (),
    ) -> None:
        super().__init__(said, where=where, remedy=remedy)
        self.nodes = nodes


class ParityError(PartitaError):
    """The exported graph does not compute what its model computes."""

    exit_code = 4


class ReportCheckError(PartitaError):
    """A report does not meet the limits it was checked against."""

    exit_code = 5


def public_type(error: Exception) -> str:
    """Name of the nearest class of this file, which everyone knows. Raises StopIteration for an error that is none."""
    return public_class(error).__name__


def public_class(error: Exception) -> type[PartitaError]:
    """The nearest class of this file. Raises StopIteration for an error that is none."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == __name__ and issubclass(kind, PartitaError))
