"""Texts in the tokens of a checkpoint, in windows, for quality measurement and calibration."""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import PartitaError, UsageError
from partita.export.checkpoint.description import Checkpoint
from partita.export.trace.fake_model import quiet, translate_errors
from partita.untrusted_files import load_full

WINDOW_TOKENS = 512
MOST_BYTES = 4 << 20
"""Bytes of a text that are read: 64 for each token that may be used."""
MOST_UNKNOWN = 0.5
"""Maximum fraction of unknown tokens in a text."""
RANDOM, NO_TEXT = "random tokens", hashlib.sha256(b"").hexdigest()
"""Recorded name and hash where random tokens replace a text."""


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of a text; each begins with the tokenizer's start token, if any."""

    name: str
    """Name of the file."""
    sha256: str
    windows: npt.NDArray[np.int64]
    """[W, L]."""

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return int(self.windows.size)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens."""

    first: list[int]
    """The tokenizer's start token, or empty."""
    ids: list[int]
    unknown_id: int | None = None
    """The tokenizer's unknown token, if it has one."""

    def windows(self, length: int) -> npt.NDArray[np.int64]:
        """The tokens in windows [W, up to `length`]; an incomplete last window is dropped."""
        body = min(length - len(self.first), len(self.ids))
        count = len(self.ids) // body if body else 0
        rows = [[*self.first, *self.ids[start * body : (start + 1) * body]] for start in range(count)]
        return np.array(rows, np.int64).reshape(count, body + len(self.first))

    def part(self, start: int, stop: int | None = None) -> Tokens:
        """A slice of the tokens."""
        return Tokens(self.first, self.ids[start:stop], self.unknown_id)


def read(path: Path, option: str) -> tuple[str, str]:
    """The beginning of a text file, and the SHA-256 of all of it. Raises UsageError with the `option`."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"`{option}={path}`: not a file; give a text file")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            file.seek(0)
            begin = file.read(MOST_BYTES)
            whole = not file.read(1)
        return codecs.getincrementaldecoder("utf-8")().decode(begin, final=whole), digest.hexdigest()
    except OSError as error:
        raise UsageError(f"`{option}={path}`: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"`{option}={path}`: not UTF-8 text ({error.reason})") from error


def tokens(text: str, checkpoint: Checkpoint, vocab_size: int) -> Tokens | None:
    """A text in the tokens of `checkpoint`; None where no tokenizer loads."""
    if not checkpoint.tokenizes:
        return None
    try:
        with quiet(), translate_errors("loading the tokenizer"):
            tokenizer, _ = load_full(checkpoint.folder)
            first = tokenizer.bos_token_id
            ids = tokenizer(text, verbose=False)["input_ids"]
    except PartitaError:  # the tokenizer probe reports it
        return None
    begins = first is not None and 0 <= first < vocab_size and bool(ids) and ids[0] == first
    kept = [i for i in ids[1 if begins else 0 :] if 0 <= i < vocab_size]
    return Tokens([first] if begins else [], kept, tokenizer.unk_token_id)


def read_windows(
    path: Path,
    option: str,
    checkpoint: Checkpoint,
    vocab_size: int,
    length: int,
    count: int,
    fewest: int,
    *,
    after: int = 0,
    chosen: bool = True,
    needs_tokenizer: bool = False,
    seed: int = 0,
) -> Text:
    """`count` tokens of the text in `path` in windows of `length`, for an option.

    The tokens after the first `after`, which quality is measured on, where there are `fewest` of them; else the first
    ones. Random tokens replace the text where no tokenizer of the checkpoint loads, and where the tokenizer gives too
    few tokens for a default text (not `chosen` by the user). Raises UsageError when the text cannot be read, is too
    short or not covered by the tokenizer, and without a tokenizer where the option needs one.
    """
    raw, sha256 = read(path, option)
    found = tokens(raw, checkpoint, vocab_size)
    if found is None and needs_tokenizer:
        raise UsageError(
            f"`{option}={path}`: the checkpoint's tokenizer cannot be loaded, so no text can be used; omit `{option}`"
        )
    problem = "" if found is None else problem_of(found.part(0, after + count), fewest)
    if found is None or (problem and not chosen):
        ids = np.random.Generator(np.random.PCG64(seed)).integers(0, vocab_size, count).tolist()
        return Text(RANDOM, NO_TEXT, Tokens([], ids).windows(length))
    if problem:
        raise UsageError(f"`{option}={path}`: {problem}")
    rest = found.part(after, after + count)
    if after and len(rest.ids) >= fewest:
        return Text(f"{path.name} after the part that quality is measured on", sha256, rest.windows(length))
    return Text(path.name, sha256, found.part(0, count).windows(length))


def problem_of(found: Tokens, fewest: int) -> str:
    """What is wrong with a text with too few tokens, or mostly unknown ones; empty otherwise."""
    if len(found.ids) < fewest:
        return f"too short: {len(found.ids):,} tokens; at least {fewest:,} are needed"
    unknown = 0 if found.unknown_id is None else found.ids.count(found.unknown_id)
    if unknown > MOST_UNKNOWN * len(found.ids):
        return (
            f"the tokenizer does not know {unknown:,} of its {len(found.ids):,} tokens; use a text in a language of "
            "the model"
        )
    return ""
