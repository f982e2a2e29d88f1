"""What `partita generate` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.commands.chain_options import ChainOptions
from partita.commands.place_options import PROBE_SECONDS, check_probe_seconds
from partita.errors import UsageError
from partita.partition_reports.limits import Limits
from partita.runtime.sampling import Sampler, make_sampler

MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Everything `partita generate` was asked."""

    package: Path
    prompts: tuple[str, ...]
    where: ChainOptions
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
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


def check_options(options: GenerateOptions) -> Sampler:
    """Check the options of the loop before anything is loaded."""
    limits = {
        "--max-new-tokens": (options.max_new_tokens, MAX_TOKENS),
        "--prefill-chunk": (1 if options.prefill_chunk is None else options.prefill_chunk, MAX_TOKENS),
    }
    for name, (value, most) in limits.items():
        if not 1 <= value <= most:
            raise UsageError(f"{name} is {value}; it must be between 1 and {most:,}")
    check_probe_seconds(options.probe_seconds)
    if options.token_ids and (options.chat or options.stop):
        raise UsageError("--token-ids works without a tokenizer, so without --chat, --system and --stop")
    return make_sampler(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by what stdin holds. Raises UsageError for text that is not UTF-8."""
    if not given:
        raise UsageError("no prompt; give one, or - to read it from stdin")
    if given.count("-") > 1:
        raise UsageError("- is given more than once; stdin holds one prompt")
    prompts = [_read_stdin() if prompt == "-" else prompt for prompt in given]
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not UTF-8 text (at character {error.start}); convert it first") from error
    return prompts


def _read_stdin() -> str:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv") from error
