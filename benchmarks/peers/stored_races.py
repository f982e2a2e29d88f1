"""Races that are done, kept until the whole run is: a run of hours that is stopped goes on where it was.

A part is one shape in one width. It is taken over where nothing that its figures depend on has changed: the commit, the
settings, who takes part, the machine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from benchmarks.peers.plan import Entry
from benchmarks.peers.race import Settings, say
from benchmarks.peers.records import Contender, Machine
from partita.observations.records import Record

PARTS = "parts"
"""Their folder, beside the files."""


class Part(Record):
    """The contenders of one width, with all that has to be equal for them to be taken over."""

    schema_id: Literal["partita.peers-part/1"] = Field(default="partita.peers-part/1", alias="schema")
    conditions: dict[str, Any]
    date: str
    """UTC."""
    parameters: int
    checkpoint_bytes: int
    contenders: tuple[Contender, ...]


@dataclasses.dataclass(slots=True)
class Parts:
    """Those of one run, in a folder."""

    folder: Path
    commit: str | None
    machine: Machine | None = None
    """That of this run, once it is known."""
    used: set[Path] = dataclasses.field(default_factory=set)
    """Files of parts that this run has taken over or made."""

    def of(self, shape: str, group: list[Entry], settings: Settings) -> Part | None:
        """What was measured before; None where nothing was, or something is not as it was then."""
        file = self._file(shape, group)
        try:
            found = Part.model_validate_json(file.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            say(f"{file} cannot be read: measured anew")
            return None
        wanted = self._conditions(group, settings)
        changed = sorted(name for name in wanted if found.conditions.get(name) != wanted[name])
        if changed:
            say(f"{file} is of another {', '.join(changed)}: measured anew")
            return None
        self.used.add(file)
        return found

    def keep(self, shape: str, group: list[Entry], settings: Settings, part: Part) -> None:
        """Store what was measured; not from files that no commit tells apart."""
        if self.commit is None or self.commit.endswith("-dirty"):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = part.model_copy(update={"conditions": self._conditions(group, settings)})
        self.used.add(self._file(shape, group))
        self._file(shape, group).write_text(kept.model_dump_json(by_alias=True, indent=1) + "\n", "utf-8")

    def forget(self) -> None:
        """The run is whole and stored: the next one measures everything. Parts of other runs stay."""
        for file in self.used:
            file.unlink(missing_ok=True)

    def _file(self, shape: str, group: list[Entry]) -> Path:
        return self.folder / f"{shape}-{group[0].provider}-{group[0].bits}.json"

    def _conditions(self, group: list[Entry], settings: Settings) -> dict[str, Any]:
        assert self.machine is not None
        return {
            "commit": self.commit,
            "settings": {**dataclasses.asdict(settings), "prompts": list(settings.prompts)},
            "contenders": [entry.name for entry in group],
            "machine": [self.machine.processor, self.machine.cores, self.machine.memory_bytes, self.machine.gpu],
        }
