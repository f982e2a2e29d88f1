"""The reason record: one reason code, when it applies, what proves it, and what to do.

One file per code in this folder exposes `REASON`; the file name is the code. To decide on a node every reason is asked,
and the finding with the strongest evidence wins, so a new file needs no place in any list. Knows nothing of the
report's shape beyond the chain entry.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from partita.partition_reports.records import ChainEntry

EvidenceKind = Literal["logged", "probed", "derived", "none"]
STRENGTH: tuple[EvidenceKind, ...] = ("logged", "probed", "derived", "none")
"""Strongest first. Logged: ONNX Runtime or the EP said so; probed: an experiment shows it; derived: it follows."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a reason may look at: one node that is not on the wanted provider."""

    node: str
    op_type: str | None
    provider: str
    """ONNX Runtime's name of the provider the node is on."""
    wanted: ChainEntry
    """First entry of the chain."""
    exported: bool
    """The ONNX file has a node of this name."""
    replaces: tuple[str, ...]
    """Exported nodes this one took the place of, where its name tells."""
    log: tuple[str, ...]
    """Native log lines that mention the node or one that it replaces."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason that applies, and what shows it."""

    kind: EvidenceKind
    evidence: str
    remedy: str | None = None
    """Only when this case needs another remedy than the reason's own."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code."""

    code: str
    level: Literal["provider", "node"]
    title: str
    condition: str
    """When the reason applies, in words."""
    needs: str
    """The evidence without which it is not given."""
    remedy: str
    example: Context
    """A node that this reason applies to; documentation and test in one."""
    decide: Callable[[Context], Finding | None]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z_]*", self.code):
            raise ValueError(f"{self.code!r} is not a reason code: lower-case letters and underscores only")


@cache
def load_reasons() -> tuple[Reason, ...]:
    """Every reason of this folder, by code. Raises ValueError when a file and its code have different names."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name != "base")
    reasons = []
    for name in names:
        reason = importlib.import_module(f"{package.__name__}.{name}").REASON
        if not isinstance(reason, Reason) or reason.code != name:
            raise ValueError(f"{package.__name__}.{name}: REASON must be a Reason whose code is {name!r}")
        reasons.append(reason)
    return tuple(reasons)


def explain(context: Context) -> tuple[Reason, Finding]:
    """The reason with the strongest evidence for this node; equal evidence goes by code.

    Raises LookupError when no reason answers, which the `unexplained` reason rules out.
    """
    answers = [(reason, finding) for reason in load_reasons() if (finding := reason.decide(context)) is not None]
    if not answers:
        raise LookupError(f"{context.node}: no reason applies")
    return min(answers, key=lambda answer: (STRENGTH.index(answer[1].kind), answer[0].code))


def logged(context: Context, pattern: str) -> Finding | None:
    """A finding when a log line about the node matches `pattern`, in which `{node}` stands for any of its names."""
    for name in (context.node, *context.replaces):
        wanted = re.compile(pattern.replace("{node}", re.escape(name) + r"(?!\S)"))
        for line in context.log:
            if wanted.search(line):
                return Finding("logged", line.strip())
    return None
