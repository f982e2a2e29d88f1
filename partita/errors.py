"""The exceptions that Partita raises. A message is one line: the problem, its place, and a remedy.

Exceptions of other libraries are translated and kept as `__cause__`, which `--debug` shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.remedies import Remedy

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
LONGEST = 4000
"""Maximum characters of a message."""


class PartitaError(Exception):
    """Base of Partita's exceptions. ``exit_code`` is the exit status of the command line.

    `path`: the file or folder, which begins the message. `remedy`: the fix, which ends the message; None if there is
    none or the text includes it. `problem`: the message without the remedy.
    """

    exit_code: int = 1

    def __init__(self, message: str, *, path: Path | None = None, remedy: Remedy | None = None) -> None:
        if len(message) > LONGEST:
            message = f"{message[:LONGEST]}... ({len(message) - LONGEST:,} more characters)"
        self.message, self.path, self.remedy = message, path, remedy
        self.problem = message if path is None else f"{path}: {message}"
        help_text = "" if remedy is None else str(remedy)
        super().__init__(f"{self.problem}; {help_text}" if help_text else self.problem)

    def prefix(self, text: str) -> None:
        """Put a text in front of the message."""
        self.problem = f"{text}; {self.problem}"
        self.args = (f"{text}; {self.args[0]}", *self.args[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is pickled as a call of its class with `args`, which lacks keyword arguments; an
        # exception that cannot be unpickled breaks a process pool.
        return _read_back, (type(self), self.args, self.__dict__)


def _read_back(kind: type[PartitaError], args: tuple[Any, ...], fields: dict[str, Any]) -> PartitaError:
    """An unpickled or copied error with all its fields."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class UsageError(PartitaError):
    """The value of an option or argument is invalid."""

    exit_code = 2


class CheckpointError(PartitaError):
    """The checkpoint is missing, damaged or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is valid, but its model cannot be exported.

    `option`: the Python argument without which the model can be exported; None if the model itself is the cause.
    """

    def __init__(
        self, message: str, *, path: Path | None = None, remedy: Remedy | None = None, option: str | None = None
    ) -> None:
        super().__init__(message, path=path, remedy=remedy)
        self.option = option


class PackageError(PartitaError):
    """The package is missing, damaged, altered, or written by a newer Partita."""


class ReportError(PartitaError):
    """The report file is missing, damaged, or written by a newer Partita."""


class ResourceError(PartitaError):
    """Memory or disk space is insufficient for the request."""


FREE_MEMORY = Remedy("close other models, or use a smaller one (partita plan shows what fits)")


def out_of_memory() -> ResourceError:
    """The error for a MemoryError."""
    return ResourceError("out of memory", remedy=FREE_MEMORY)


class InstallationError(PartitaError):
    """A required library is not installed or does not load; the message has the command that fixes it."""


class GenerationError(PartitaError):
    """The generation loop cannot start or continue."""


@dataclass(frozen=True, slots=True)
class ProviderRefusal:
    """A provider of the chain that does not run a node, with the reason."""

    provider: str
    """ONNX Runtime's name."""
    reason: str
    """A reason code."""
    evidence_kind: str
    evidence: str
    remedy: str
    available: bool = True
    """Whether the provider is available; if not, the reason applies to every node."""


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """A node that would leave the providers of the chain."""

    node: str
    """Name of the node; may be empty."""
    op_type: str | None
    module: str | None
    provider: str
    """The provider that would run it."""
    refusals: tuple[ProviderRefusal, ...]
    """The providers of the chain that do not run it, in order."""

    @property
    def available_refusals(self) -> tuple[ProviderRefusal, ...]:
        """The available providers of `refusals`; the first provider if none is available."""
        return tuple(entry for entry in self.refusals if entry.available) or self.refusals[:1]


class ProviderError(PartitaError):
    """The provider chain could not be honoured. `nodes`: the nodes that would leave it, in execution order."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        remedy: Remedy | None = None,
        nodes: tuple[RefusedNode, ...] = (),
    ) -> None:
        super().__init__(message, path=path, remedy=remedy)
        self.nodes = nodes


class ParityError(PartitaError):
    """The outputs of the exported graph do not match those of the source model."""

    exit_code = 4


class ReportCheckError(PartitaError):
    """A report does not meet its requirements."""

    exit_code = 5


def public_type(error: Exception) -> str:
    """Name of `public_class`."""
    return public_class(error).__name__


def public_class(error: Exception) -> type[PartitaError]:
    """The nearest base class in this module. Raises StopIteration for an exception of another library."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == __name__ and issubclass(kind, PartitaError))
