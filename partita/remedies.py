"""Remedies: what to do about an error or a fallback, in words and as a command line or options of it.

A remedy is a constant of its module, with blanks in braces, so that a test can find each of them and try it.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

SPECIAL = frozenset('"$`\\!%\n')
"""Characters that mean something to a shell inside double quotes."""
LFS_HEAD = b"version https://git-lfs.github.com/spec/v1"
"""How the text begins that Git LFS leaves in place of a file it has not downloaded."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do. `command` and `options` are words, unquoted; at most one of the two is given."""

    text: str
    """In words, without a full stop and without commands."""
    command: tuple[str, ...] = ()
    """A command line that does it, by itself and as it stands once the blanks are filled in."""
    options: tuple[str, ...] = ()
    """What to add to the command line that was given."""
    otherwise: Remedy | None = None
    """Something else that helps as well."""

    def filled(self, **blanks: object) -> Remedy:
        """With its blanks filled in; a tuple makes several words of one. Raises KeyError when a blank is left."""
        return Remedy(
            self.text.format(**blanks),
            tuple(filled_word for word in self.command for filled_word in _fill(word, blanks)),
            tuple(filled_word for word in self.options for filled_word in _fill(word, blanks)),
            self.otherwise.filled(**blanks) if self.otherwise is not None else None,
        )

    def __str__(self) -> str:
        """All of it on one line: `let it be read: chmod u+r 'my model'`, `try it: --provider cpu`."""
        own = ": ".join(part for part in (self.text, self.words) if part)
        return own if self.otherwise is None else f"{own}, or {self.otherwise}"

    @property
    def words(self) -> str:
        """The command, or the options, alone."""
        return shell(self.command or self.options)


def _fill(word: str, blanks: Mapping[str, object]) -> tuple[str, ...]:
    """The words that one word with blanks becomes."""
    several = blanks.get(word[1:-1]) if word[:1] == "{" and word[-1:] == "}" else None
    return several if isinstance(several, tuple) else (word.format(**blanks),)


def shell(words: Iterable[str]) -> str:
    """Words of a command line as a shell takes them: in double quotes, which cmd.exe knows too, where those do."""
    return " ".join(quoted(word) for word in words)


def split(text: str) -> tuple[str, ...]:
    """The words that `shell` wrote; of a text that it did not write, what stands between spaces."""
    try:
        return tuple(shlex.split(text))
    except ValueError:  # a quotation mark without another
        return tuple(text.split())


def quoted(word: str) -> str:
    """One word for a shell."""
    plain = shlex.quote(word)
    return plain if plain == word or set(word) & SPECIAL else f'"{word}"'


def any_of(remedies: Iterable[Remedy]) -> Remedy | None:
    """Several remedies as one, each as what else helps; None for none."""
    first, *others = dict.fromkeys(remedies) or (None,)
    if first is None or not others:
        return first
    if first.otherwise is not None:
        others.insert(0, first.otherwise)
    return replace(first, otherwise=any_of(others))


FROM_CHECKPOINT = Remedy("export the checkpoint again")
DECODERS_ONLY = Remedy("name the folder of a text decoder")
MAY_READ = Remedy("let it be read", ("chmod", "u+r", "{path}"))
MAY_ENTER = Remedy("let the folder be read", ("chmod", "u+rx", "{path}"))
MAY_WRITE = Remedy("let it be written", ("chmod", "u+w", "{path}"))
LFS_PULL = Remedy(
    "a pointer that Git LFS left in place of the file, which was not downloaded; in {folder} run",
    ("git", "lfs", "pull"),
)


def permission(path: Path, *, write: bool = False) -> Remedy:
    """What to do about a file or folder that this process is not permitted to open; folders above it come first."""
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            return MAY_ENTER.filled(path=folder)
    if write:
        return MAY_WRITE.filled(path=path if path.exists() else path.absolute().parent)
    return (MAY_ENTER if path.is_dir() else MAY_READ).filled(path=path)


def what_to_do(error: OSError, otherwise: str, written: Path = Path()) -> str:
    """What a user can do about `error`: TMPDIR where a temporary folder is missing or full, else `otherwise`.

    `written`: the folder that results are written to. An error about room that names no file is of the temporary folder
    where that has less room.
    """
    lacking = isinstance(error, FileNotFoundError) and error.filename is None and "temporary" in str(error.strerror)
    full = isinstance(error.filename, str) and is_temporary(Path(error.filename))
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            full = shutil.disk_usage(tempfile.gettempdir()).free < shutil.disk_usage(written).free
    return "set TMPDIR to a folder with room that can be written to" if lacking or full else otherwise


def is_temporary(path: Path) -> bool:
    """Whether a temporary folder of ours, and no user, chose the place of `path`."""
    with suppress(OSError):  # there may be no place for temporary files at all
        base = Path(tempfile.gettempdir())
        parts = (base.name, *path.relative_to(base).parts) if path.is_relative_to(base) else ()
        return any(part.startswith("partita-") for part in parts)
    return False


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a pointer in place of this file; False where it cannot be read."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_HEAD)) == LFS_HEAD
    except OSError:
        return False


def lfs_pull(path: Path) -> Remedy:
    """What to do about a pointer."""
    return LFS_PULL.filled(folder=path.parent)
