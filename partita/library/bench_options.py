"""What a bench can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partita.errors import UsageError
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.chain import COMMAND_LINE
from partita.options import MAX_TOKENS
from partita.spelling import spelled

ROUNDS = 5
MOST_ROUNDS = 1000
PROMPT_TOKENS = 64
NEW_TOKENS = 32
LEAST_NEW_TOKENS = 2
"""The first comes from prefill."""
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything that a bench is asked."""

    package: Path
    against: tuple[Path, ...] = ()
    """Packages to compare it with."""
    chains: tuple[str, ...] = ()
    """One per contender, as written."""
    baseline: str | None = None
    prompt: str | tuple[int, ...] | None = None
    """A text or token ids; None for made-up tokens."""
    prompt_tokens: int | None = None
    max_new_tokens: int = NEW_TOKENS
    prefill_chunk: int | None = None
    rounds: int = ROUNDS
    provider_options: tuple[str, ...] = ()
    provider_libraries: tuple[str, ...] = ()
    threads: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    reports: Path | None = None
    """A folder."""
    choice: Choice = AS_IT_IS
    """What was said of those of the folders that Partita did not write."""
    source: str = COMMAND_LINE
    """Where the chains come from, as a report says it."""

    @property
    def packages(self) -> tuple[Path, ...]:
        """Every package, the one that the others are compared with first."""
        return (self.package, *self.against)


def check_options(options: BenchOptions) -> None:
    """Raise UsageError for a value that makes no sense."""
    limits = {
        "max_new_tokens": (options.max_new_tokens, LEAST_NEW_TOKENS, MAX_TOKENS),
        "prefill_chunk": (1 if options.prefill_chunk is None else options.prefill_chunk, 1, MAX_TOKENS),
        "prompt_tokens": (1 if options.prompt_tokens is None else options.prompt_tokens, 1, MAX_TOKENS),
        "rounds": (options.rounds, 1, MOST_ROUNDS),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UsageError(f"{spelled(name)} is {value}; it must be between {least} and {most:,}")
    if not 0 < options.timeout_seconds <= MAX_TOKENS:
        raise UsageError(f"{spelled('timeout_seconds')} is {options.timeout_seconds:g}; give seconds above 0")
    if options.prompt is not None and options.prompt_tokens is not None:
        raise UsageError(
            f"{spelled('prompt')} and {spelled('prompt_tokens')}: give one of them; the second is the length of a "
            "generated prompt"
        )
