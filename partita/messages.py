"""Names in messages: options as Python, flag or JSON field, and suggestions for unknown words.

A message names an option by its Python argument in backticks, alone or with a value: `max_length`, `max_length=5`. The
command line prints it as a flag, an error of a prompt file as a field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

OPTION = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def rename_options(text: str, names: Mapping[str, str], write: Callable[[str, str | None], str]) -> str:
    """The text with each option of `names` replaced by `write(new name, value)`; value None: no value is given."""
    return OPTION.sub(lambda found: write(names[found[1]], found[2]) if found[1] in names else found[0], text)


def as_flag(flag: str, value: str | None) -> str:
    """An option as a flag: `--max-length 5`, `--force`, `--no-verify`."""
    if value in (None, "True"):
        return flag
    return f"--no-{flag[2:]}" if value == "False" else f"{flag} {value}"


def as_field(name: str, value: str | None) -> str:
    """An option as a JSON field: `field max_tokens 5`."""
    return f"field {name}" if value is None else f"field {name} {value}"


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """At most three suggestions for an unknown word: names that begin with it, else the most similar name.

    For a word of at most four letters, similar names share its first letter: h100 is no suggestion for v100.
    """
    by_lower = {name.lower(): name for name in names}
    word = word.strip().lower()
    longer = [name for name in by_lower if len(word) > 1 and name.startswith(word)]
    shorter = [name for name in by_lower if word.startswith(f"{name}-")]
    possible = [name for name in by_lower if len(word) > 4 or name[:1] == word[:1] or word in name]
    alike = longer or shorter or difflib.get_close_matches(word, possible, 1, cutoff)
    return tuple(by_lower[name] for name in alike[:3])


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'? `, with a trailing blank; empty without names."""
    listed = " or ".join(map(repr, names))
    return f"did you mean {listed}? " if listed else ""
