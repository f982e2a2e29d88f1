"""What `partita bench` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partita.commands.generate_options import MAX_TOKENS
from partita.errors import UsageError

ROUNDS = 5
MOST_ROUNDS = 1000
PROMPT_TOKENS = 64
LEAST_NEW_TOKENS = 2
"""The first comes from prefill."""
FLAG = "--provider"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything `partita bench` was asked."""

    package: Path
    against: tuple[Path, ...]
    """Packages to compare it with."""
    chains: tuple[str, ...]
    """One per contender, as written."""
    baseline: str | None
    prompt: str | None
    """None for made-up tokens."""
    token_ids: bool
    prompt_tokens: int | None
    max_new_tokens: int
    prefill_chunk: int | None
    rounds: int
    provider_options: tuple[str, ...]
    provider_libraries: tuple[str, ...]
    threads: int | None
    timeout_seconds: float
    report: Path | None
    """A folder."""
    out: Path | None
    """A file for the result."""
    as_json: bool

    @property
    def packages(self) -> tuple[Path, ...]:
        """Every package, the one that the others are compared with first."""
        return (self.package, *self.against)


def check_options(options: BenchOptions) -> None:
    """Raise UsageError for a value that makes no sense."""
    limits = {
        "--max-new-tokens": (options.max_new_tokens, LEAST_NEW_TOKENS, MAX_TOKENS),
        "--prefill-chunk": (1 if options.prefill_chunk is None else options.prefill_chunk, 1, MAX_TOKENS),
        "--prompt-tokens": (1 if options.prompt_tokens is None else options.prompt_tokens, 1, MAX_TOKENS),
        "--rounds": (options.rounds, 1, MOST_ROUNDS),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UsageError(f"{name} is {value}; it must be between {least} and {most:,}")
    if not 0 < options.timeout_seconds <= MAX_TOKENS:
        raise UsageError(f"--timeout is {options.timeout_seconds:g}; give seconds above 0")
    if options.prompt is not None and options.prompt_tokens is not None:
        raise UsageError(
            "--prompt and --prompt-tokens: give one of them; the second is the length of a generated prompt"
        )
    if options.token_ids and options.prompt is None:
        raise UsageError("--token-ids says how --prompt is written; give --prompt, e.g. --prompt 1,45,7")
