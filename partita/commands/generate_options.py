"""What `partita generate` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from partita.commands.terminal import note
from partita.errors import PackageError, UsageError
from partita.library.chain import ChainOptions
from partita.library.place_options import PROBE_SECONDS, check_probe_seconds
from partita.observations.text_format import listing
from partita.partition_reports.limits import Limits
from partita.runtime.sampling import Sampler, make_sampler
from partita.runtime.suggested import Suggestion, suggestion

MAX_TOKENS = 1 << 24
MAX_NEW_TOKENS = 128
"""The default of --max-new-tokens."""
CHECKPOINT = "checkpoint"
"""The value of --sampling that takes what the checkpoint suggests."""
SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and how often. None: not asked."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    source: str | None = None
    """`checkpoint`: what was not asked is as the checkpoint suggests."""

    def resolved(self, folder: Path) -> tuple[Sampling, tuple[str, ...]]:
        """The same with a value for everything, and what the user has to know of it. Raises UsageError, PackageError.

        A run that draws gets a seed where none was given, so that it can be repeated.
        """
        if self.source not in (None, CHECKPOINT):
            raise UsageError(f"--sampling {self.source}: the only value is {CHECKPOINT}; leave it out for the options")
        suggests = suggestion(folder) if self.source else Suggestion()
        full = Sampling(
            temperature=suggests.temperature if self.temperature is None else self.temperature,
            top_k=suggests.top_k if self.top_k is None else self.top_k,
            top_p=suggests.top_p if self.top_p is None else self.top_p,
            min_p=suggests.min_p if self.min_p is None else self.min_p,
            repetition_penalty=(
                suggests.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
            ),
            seed=self.seed,
            max_new_tokens=self.max_new_tokens or suggests.max_new_tokens or MAX_NEW_TOKENS,
            source=self.source,
        )
        full.sampler()
        notes = [self.source_note(suggests)] if self.source else [self.suggestion_note(folder)]
        notes.append(full.ignored_note(self))
        if full.temperature and full.seed is None:
            full = replace(full, seed=secrets.randbits(SEED_BITS))
            notes.append(f"seed {full.seed} was drawn; --seed {full.seed} repeats this run")
        return full, tuple(filter(None, notes))

    def source_note(self, suggests: Suggestion) -> str:
        """What the checkpoint suggests and Partita does not have."""
        names = ", ".join(suggests.unknown)
        return f"the checkpoint also asks for {names}, which Partita does not have" if names else ""

    def suggestion_note(self, folder: Path) -> str:
        """What the checkpoint suggests, where the user has not said how to sample."""
        if self != Sampling(max_new_tokens=self.max_new_tokens):
            return ""
        try:
            suggests = suggestion(folder)
        except PackageError:  # nobody asked for it
            return ""
        words = suggests.words()
        return f"greedy by default; the checkpoint suggests {words}: --sampling checkpoint" if suggests.sampled else ""

    def ignored_note(self, asked: Sampling) -> str:
        """Options that a greedy choice does not look at. `self` is resolved."""
        if self.temperature:
            return ""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
        given = [
            f"--{name.replace('_', '-')}" for name, value in off.items() if getattr(asked, name) not in (None, value)
        ]
        if not given:
            return ""
        verb = "is" if len(given) == 1 else "are"
        return f"{listing(given)} {verb} ignored: temperature 0 takes the likeliest token; give --temperature to sample"

    def sampler(self) -> Sampler:
        """The function that chooses; what was not asked is off. Raises UsageError for a value out of range."""
        return make_sampler(
            temperature=self.temperature or 0.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=self.seed,
        )

    def figures(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "source"}


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Everything `partita generate` was asked."""

    package: Path
    prompts: tuple[str, ...]
    where: ChainOptions
    sampling: Sampling
    """As asked until `resolve`, which leaves nothing of it None but the seed of a greedy run."""
    stop: tuple[str, ...]
    chat: bool
    system: str | None
    token_ids: bool
    prefill_chunk: int | None
    """None for the default."""
    report: Path | None
    as_json: bool
    limits: Limits = Limits()
    probe_seconds: float = PROBE_SECONDS
    """Time for experiments on nodes that fell back, after the run and for its report; 0: none."""


def check_options(options: GenerateOptions) -> None:
    """Check the options of the loop before anything is read. Raises UsageError."""
    wanted = options.sampling.max_new_tokens
    limits = {
        "--max-new-tokens": (1 if wanted is None else wanted, MAX_TOKENS),
        "--prefill-chunk": (1 if options.prefill_chunk is None else options.prefill_chunk, MAX_TOKENS),
    }
    for name, (value, most) in limits.items():
        if not 1 <= value <= most:
            raise UsageError(f"{name} is {value}; it must be between 1 and {most:,}")
    check_probe_seconds(options.probe_seconds)
    if options.token_ids and (options.chat or options.stop):
        raise UsageError("--token-ids works without a tokenizer, so without --chat, --system and --stop")
    options.sampling.sampler()


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by what stdin holds. Raises UsageError for text that is not UTF-8."""
    if not given:
        raise UsageError("no prompt; give one, or - to read it from stdin")
    if given.count("-") > 1:
        raise UsageError("- is given more than once; stdin holds one prompt")
    return [read_stdin() if prompt == "-" else argument_text(prompt, "the prompt") for prompt in given]


def argument_text(text: str, what: str) -> str:
    """Text of the command line, which is UTF-8 whatever the locale says. Raises UsageError when it is not.

    In the C locale Python reads other bytes than ASCII as surrogates, one each.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text (byte {error.start}); convert it first") from error
    except UnicodeEncodeError:  # another locale than UTF-8 or C, in which it has been read as text
        return text


def read_stdin() -> str:
    """All that stdin holds, without one line end behind it, which echo and editors add. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError("- reads the prompt from stdin, which is closed; give the prompt as an argument")
    if sys.stdin.isatty():
        note("note: reading the prompt from the terminal, until Ctrl-D on a line of its own")
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv") from error
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")
