"""Remedies for errors and fallbacks: text with a command line or options.

Each remedy is a module constant with placeholders in braces, so that tests can find and run it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

SPECIAL = frozenset('"$`\\!%\n')
"""Characters that a shell interprets inside double quotes."""
LFS_HEAD = b"version https://git-lfs.github.com/spec/v1"
"""First line of the pointer file that Git LFS writes for a file it has not downloaded."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A fix. `command` and `options` are unquoted words; at most one of the two is set."""

    text: str
    """Description without a full stop and without commands."""
    command: tuple[str, ...] = ()
    """Complete command line, with placeholders."""
    options: tuple[str, ...] = ()
    """Options to add to the user's command line."""
    alternative: Remedy | None = None
    """An alternative."""

    def filled(self, **blanks: object) -> Remedy:
        """A copy with its placeholders filled; a tuple becomes several words. Raises KeyError for a missing value."""
        return Remedy(
            self.text.format(**blanks),
            tuple(filled_word for word in self.command for filled_word in _fill(word, blanks)),
            tuple(filled_word for word in self.options for filled_word in _fill(word, blanks)),
            self.alternative.filled(**blanks) if self.alternative is not None else None,
        )

    def __str__(self) -> str:
        """The remedy on one line: `make it readable: chmod u+r 'my model'`, `try it: --provider cpu`."""
        own = ": ".join(part for part in (self.text, self.words) if part)
        return own if self.alternative is None else f"{own}, or {self.alternative}"

    @property
    def words(self) -> str:
        """The command or the options without the text."""
        return shell(self.command or self.options)


def _fill(word: str, blanks: Mapping[str, object]) -> tuple[str, ...]:
    """The words that a word with placeholders expands to."""
    several = blanks.get(word[1:-1]) if word[:1] == "{" and word[-1:] == "}" else None
    return several if isinstance(several, tuple) else (word.format(**blanks),)


def shell(words: Iterable[str]) -> str:
    """Words quoted for a shell, with double quotes where possible, because cmd.exe accepts no others."""
    return " ".join(quote(word) for word in words)


def split(text: str) -> tuple[str, ...]:
    """The words of a command line from `shell`; text with unbalanced quotes is split at blanks."""
    try:
        return tuple(shlex.split(text))
    except ValueError:  # a quotation mark without another
        return tuple(text.split())


def quote(word: str) -> str:
    """A word quoted for a shell."""
    plain = shlex.quote(word)
    return plain if plain == word or set(word) & SPECIAL else f'"{word}"'


def any_of(remedies: Iterable[Remedy]) -> Remedy | None:
    """Several remedies joined as alternatives; None for none."""
    first, *others = dict.fromkeys(remedies) or (None,)
    if first is None or not others:
        return first
    if first.alternative is not None:
        others.insert(0, first.alternative)
    return replace(first, alternative=any_of(others))


FROM_CHECKPOINT = Remedy("export the checkpoint again")
DECODERS_ONLY = Remedy("name the folder of a text decoder")
LFS_PULL = Remedy(
    "the file is a Git LFS pointer and was not downloaded; in {folder} run",
    ("git", "lfs", "pull"),
)


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is a Git LFS pointer; False if it cannot be read."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_HEAD)) == LFS_HEAD
    except OSError:
        return False


def lfs_pull(path: Path) -> Remedy:
    """The remedy for a Git LFS pointer."""
    return LFS_PULL.filled(folder=path.parent)
