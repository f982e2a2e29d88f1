"""What a run of `make bench-peers` measured: frozen, versioned, every turn kept. Schema `partita.peers/2`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal

from pydantic import Field

from partita.capacity.records import MachineRates
from partita.observations.records import Record

PeerName = Literal["partita", "genai", "llama", "optimum", "transformers"]
Bits = Literal[4, 8, 16, 32]
DISTURBED_CORES = 0.2
"""Figures are not to be published if other processes take more of a core than this."""


class Spread(Record):
    """Median and quartiles of some turns."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """That of `values`, at least one."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


class Turn(Record):
    """One prompt read and answered."""

    prefill_seconds: float
    """To the first token."""
    decode_seconds: float
    """Of all tokens after the first."""
    others_cores: float | None
    """Cores that other processes, and other machines on the same host, kept busy during the turn."""


class Work(Record):
    """The turns of one contender with one prompt."""

    prompt_tokens: int
    new_tokens: int
    turns: tuple[Turn, ...]
    tokens: tuple[int, ...]
    """Of the first counted turn."""
    finite: bool
    """All logits that were looked at, in all turns."""
    tokens_per_turn_equal: bool
    """Each turn gave the same tokens."""

    @property
    def prefill_rates(self) -> list[float]:
        """Prompt tokens per second, by turn."""
        return [self.prompt_tokens / turn.prefill_seconds for turn in self.turns]

    @property
    def decode_rates(self) -> list[float]:
        """New tokens per second after the first, by turn."""
        return [(self.new_tokens - 1) / turn.decode_seconds for turn in self.turns]


class Start(Record):
    """A new process, from a library that is imported to the first token after a prompt."""

    import_seconds: float
    load_seconds: float
    prefill_seconds: float
    peak_rss_bytes: int
    """After that one prompt."""

    @property
    def first_token_seconds(self) -> float:
        """Load and first prompt, without the import of libraries."""
        return self.load_seconds + self.prefill_seconds


class Written(Record):
    """How the files of a model were made."""

    command: str
    seconds: float
    peak_rss_bytes: int
    """Of the largest process that took part."""
    stages: dict[str, float] = {}
    """Seconds of each, as far as the exporter tells."""
    others_cores: float = 0.0
    """Cores that other processes kept busy meanwhile."""

    @property
    def disturbed(self) -> bool:
        """Its seconds are not to be compared."""
        return self.others_cores > DISTURBED_CORES


class Contender(Record):
    """A peer with one form of a model."""

    name: str
    peer: PeerName
    form: str
    """fp32, int4-b64, q4_0, …"""
    bits: Bits
    """What it is compared with."""
    error: str | None = None
    """Why there are no figures, or no more of them."""
    written: Written | None = None
    file_bytes: int | None = None
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    starts: tuple[Start, ...] = ()
    works: tuple[Work, ...] = ()
    peak_rss_bytes: int | None = None
    """Over all prompts."""

    def work(self, prompt_tokens: int) -> Work | None:
        """That with this prompt."""
        return next((each for each in self.works if each.prompt_tokens == prompt_tokens and each.turns), None)


class ShapeResult(Record):
    """All contenders with one model."""

    shape: str
    title: str
    parameters: int
    checkpoint_bytes: int
    contenders: tuple[Contender, ...]


class Machine(Record):
    """Where it ran, and the rates of its memory and arithmetic."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    threads: int
    load_average: float | None
    """Over the minute before the run; None where the system has none."""
    rates: MachineRates
    """With the same number of threads."""
    gpu: str | None = None


class PeersResult(Record):
    """One run of the command."""

    schema_id: Literal["partita.peers/2"] = Field(default="partita.peers/2", alias="schema")
    partita_version: str
    commit: str | None
    date: str
    command: str
    machine: Machine
    rounds: int
    start_prompt: int
    disturbed: tuple[str, ...]
    """Reasons why these figures are not to be published; none when the machine was idle."""
    shapes: tuple[ShapeResult, ...]


def write(result: PeersResult, file: Path) -> None:
    """Store a result."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(result.model_dump_json(by_alias=True, indent=1) + "\n", "utf-8")


def read(file: Path) -> PeersResult:
    """Read a result. Raises ValidationError for anything else, OSError."""
    return PeersResult.model_validate_json(file.read_text("utf-8"))
