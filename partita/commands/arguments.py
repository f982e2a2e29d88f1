"""Arguments of several verbs: prompts, token ids, and the package of a MODEL."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from partita.commands.terminal import TERMINAL, Bars, note
from partita.errors import UsageError
from partita.library.model_cache import folder_of
from partita.options.fields import PathText, group
from partita.options.groups import ForeignFolder, SourceOptions
from partita.providers.resolve import parse_chain
from partita.runtime.generate.text.tokens import MOST_BYTES


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by the text of stdin, which is UTF-8. Raises UsageError."""
    if not given:
        raise UsageError("no prompt; give one, or - to read it from stdin")
    if given.count("-") > 1:
        raise UsageError("- is given more than once; stdin holds one prompt")
    return [_read_stdin() if prompt == "-" else prompt for prompt in given]


def parse_ids(prompt: str) -> list[int]:
    """Token ids as --token-ids has them, between commas or blanks. Raises UsageError, also for nothing between two
    commas: a value that a script left out would make a shorter prompt.
    """
    parts = [part.split() for part in prompt.split(",")]
    words = [word for part in parts for word in part]
    if (len(parts) > 1 and not all(parts)) or not all(re.fullmatch("-?[0-9]{1,20}", word) for word in words):
        raise UsageError(f"--token-ids: {prompt[:40]!r} is not a list of token ids such as 1,45,7")
    return [int(word) for word in words]


def _read_stdin() -> str:
    """The text of stdin without one trailing newline, which echo and editors add. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError("prompt -: stdin is closed; give the prompt as an argument")
    if sys.stdin.isatty():
        note("note: reading the prompt from the terminal, until Ctrl-D on a line of its own")
    raw = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"stdin has more than {MOST_BYTES:,} bytes, the maximum for a prompt; shorten it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv") from error
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def package_of(model: PathText, options: SourceOptions) -> Path:
    """The folder that runs MODEL: itself, or the package that it is exported to for the first provider of the chain.

    `options`: those of the verb, with `providers` or `chains`. Raises as `folder_of`.
    """
    chain = getattr(options, "providers", None) or next(iter(getattr(options, "chains", None) or ()), None)
    by_library = getattr(options, "provider_libraries", None)
    target = parse_chain(chain)[0].name if isinstance(chain, str) and not by_library else None
    source = os.fspath(model)
    foreign = group(options, ForeignFolder) if isinstance(options, ForeignFolder) else None
    with Bars() as bars:
        return folder_of(
            source,
            options.precision,
            target,
            revision=options.revision,
            foreign=foreign,
            progress=bars,
            audience=TERMINAL,
        )
