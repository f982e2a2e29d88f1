"""The reason record: one reason code, when it applies, what proves it, and what to do.

One file per code in this folder exposes `REASON`; the file name is the code. Which of several goes first is decided by
`partita.diagnosis.precedence`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from partita.diagnosis.evidence import Context, Finding, usual
from partita.diagnosis.steps import Step
from partita.observations.codes import EvidenceKind, ReasonCode


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code."""

    code: ReasonCode
    level: Literal["provider", "node"]
    title: str
    condition: str
    """When the reason applies, in words."""
    needs: str
    """The evidence without which it is not given."""
    remedy: str
    example: Context
    """A node that this reason applies to; documentation and test in one."""
    steps: tuple[Step, ...] = ()
    """Commands that go with the remedy, the one to try first before the others."""
    find: Callable[[Context], Iterable[Finding]] | None = None
    """What shows it; None: what shows any reason, see `evidence.usual`."""
    entry_kind: EvidenceKind = "logged"
    """How it is known when a provider is not there for this reason."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z_]*", self.code):
            raise ValueError(f"{self.code!r} is not a reason code: lower-case letters and underscores only")

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """Everything that shows this reason for a node; empty when it does not apply."""
        return tuple(usual(context, self.code, self.entry_kind) if self.find is None else self.find(context))


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
