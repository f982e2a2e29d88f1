"""The provider record: what Partita knows about one execution provider, as data.

One file per provider in this folder exposes `PROVIDER`, one `Provider` record; the file name is the registry key.
Nothing here imports ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Option:
    """One provider option. `kind` decides how a value from the command line is checked."""

    name: str
    kind: Literal["int", "bool", "text"]
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Provider:
    """What Partita knows about one execution provider."""

    name: str
    """The name used on the command line, which is also the file name."""
    ort_name: str
    """ONNX Runtime's name, e.g. CPUExecutionProvider."""
    aliases: tuple[str, ...]
    wheels: tuple[str, ...]
    """Python packages whose ONNX Runtime contains this provider."""
    device_memory: str
    """Name of the memory info of its tensors, as ONNX Runtime prints it."""
    preferred_attention: str
    """Attention lowering that `--attention auto` picks for it when it cannot be asked."""
    options: tuple[Option, ...] = ()
    remedy_not_in_build: str = ""
    """What to do when the installed ONNX Runtime does not contain it."""

    def __post_init__(self) -> None:
        if not self.ort_name.endswith("ExecutionProvider"):
            raise ValueError(f"{self.name}: {self.ort_name!r} is not a name ONNX Runtime uses for a provider")
        if self.name in self.aliases or len(set(self.aliases)) != len(self.aliases):
            raise ValueError(f"{self.name}: aliases repeat a name")

    def names(self) -> tuple[str, ...]:
        """Every name a user may write for it, in lower case."""
        return (self.name, *self.aliases, self.ort_name.lower())
