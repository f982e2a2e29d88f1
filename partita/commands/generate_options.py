"""What `partita generate` can be asked, and the checks that need nothing loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from partita.check.limits import Limits
from partita.commands.terminal import note
from partita.errors import UsageError
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.chain import ChainOptions, chain_of
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.observations.text_format import listing
from partita.options import GenerateCommand, group, path_of
from partita.runtime.text import MOST_BYTES
from partita.spelling import spelled


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Everything `partita generate` was asked."""

    package: Path
    prompts: tuple[str, ...]
    where: ChainOptions
    sampling: Sampling
    """As asked, until it is completed."""
    stop: tuple[str, ...]
    chat: bool
    system: str | None
    token_ids: bool
    prefill_chunk: int | None
    """None for the default."""
    report: Path | None
    as_json: bool
    adapter: str | None = None
    """Name of an adapter of the package."""
    prefix: Path | None = None
    """File of a prefix that every prompt goes on with."""
    save_prefix: Path | None = None
    """The prompt, or the system message, is read and kept here; nothing is generated."""
    speculation: Speculation = NO_SPECULATION
    """Who guesses what follows."""
    limits: Limits = Limits()
    probe_seconds: float = 120.0
    """Time for experiments on nodes that fell back, after the run and for its report; 0: none."""
    choice: Choice = AS_IT_IS
    """What was said of a folder that Partita did not write."""
    input: Path | None = None
    """A file of prompts, in place of `prompts`."""
    output: Path | None = None
    """The file of its answers."""
    address: str | None = None
    """Of the cluster that answers them; None: this process does."""
    workers: int | None = None
    """Worker processes of the cluster."""


def nested(options: GenerateCommand) -> GenerateOptions:
    """The options of the command line by what uses them."""
    return GenerateOptions(
        package=Path(options.package),
        prompts=(*options.prompts, *options.more_prompts),
        where=replace(chain_of(options), graph_capture=options.graph_capture),
        sampling=group(options, Sampling),
        stop=tuple(options.stop),
        chat=options.chat or options.system is not None,
        system=options.system,
        token_ids=options.token_ids,
        prefill_chunk=options.prefill_chunk,
        report=path_of(options.report),
        as_json=options.as_json,
        adapter=options.adapter,
        prefix=path_of(options.prefix),
        save_prefix=path_of(options.save_prefix),
        speculation=Speculation.of(options),
        limits=Limits.of(options),
        probe_seconds=options.probe_seconds,
        choice=Choice.of(options),
        input=path_of(options.input),
        output=path_of(options.output),
        address=options.address,
        workers=options.workers,
    )


def check_options(options: GenerateOptions) -> None:
    """Check the options of the loop before anything is read. Raises UsageError."""
    if options.token_ids and (options.chat or options.stop):
        raise UsageError("--token-ids works without a tokenizer, so without --chat, --system and --stop")
    if options.save_prefix is not None:
        _check_saving(options)
    if options.prefix is not None and options.system is not None:
        raise UsageError("--prefix has the system message, if there is one; leave out --system")
    if "" in options.stop:
        raise UsageError("--stop is empty; give the text to stop at")
    if options.input is None and options.output is not None:
        raise UsageError("--output is for the answers of a file of prompts; give that with --input")
    if options.input is not None and options.output is None:
        raise UsageError("--input needs a file for the answers; give it with --output")
    if options.address is None and options.workers is not None:
        raise UsageError("--workers is for a cluster; give its address with --address")
    if options.input is not None and options.prompts:
        raise UsageError("prompts come from --input or from the command line; give one of them")


def _check_saving(options: GenerateOptions) -> None:
    """Raise UsageError for what has no meaning where a prefix is saved and nothing is generated."""
    beside = {"--prefix": options.prefix, "--input": options.input, "--report": options.report}
    given = [name for name, value in beside.items() if value is not None] + ["--json"] * options.as_json
    given += [f"--{name}" for name in options.speculation.told]
    asked = {**options.sampling.figures(), "sampling": options.sampling.source}
    given += [spelled(name) for name, value in asked.items() if value is not None]
    given += ["--stop"] * bool(options.stop)
    if given:
        raise UsageError(f"--save-prefix generates nothing, so {listing(given)} cannot be given with it")
    if options.limits.given():
        raise UsageError("--save-prefix looks at no limits of placement; leave them out, and check them with place")
    if options.chat and options.system is None:
        raise UsageError("--save-prefix of a conversation keeps its system message; give --system in place of --chat")
    if len(options.prompts) != (options.system is None):
        raise UsageError("--save-prefix keeps one text: give one prompt, or --system and no prompt")


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by what stdin holds. Raises UsageError for text that is not UTF-8."""
    if not given:
        raise UsageError("no prompt; give one, or - to read it from stdin")
    if given.count("-") > 1:
        raise UsageError("- is given more than once; stdin holds one prompt")
    return [_read_stdin() if prompt == "-" else argument_text(prompt, "the prompt") for prompt in given]


def parse_ids(prompt: str) -> list[int]:
    """Token ids as --token-ids has them, between commas or blanks. Raises UsageError, also for nothing between two
    commas: what a script has left out there would make a shorter prompt.
    """
    parts = [part.split() for part in prompt.split(",")]
    words = [word for part in parts for word in part]
    if (len(parts) > 1 and not all(parts)) or not all(re.fullmatch("-?[0-9]{1,20}", word) for word in words):
        raise UsageError(f"--token-ids: {prompt[:40]!r} is not a list of token ids such as 1,45,7")
    return [int(word) for word in words]


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


def _read_stdin() -> str:
    """All that stdin holds, without one line end behind it, which echo and editors add. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError("- reads the prompt from stdin, which is closed; give the prompt as an argument")
    if sys.stdin.isatty():
        note("note: reading the prompt from the terminal, until Ctrl-D on a line of its own")
    raw = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"stdin holds more than {MOST_BYTES:,} bytes, the longest prompt; give a shorter one")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv") from error
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")
