"""Names in messages: the options that a message is about, and the names that an unknown word may stand for.

A message names an option by its Python argument in backticks, alone or with its value: `max_length`, `max_length=5`.
The command line rewrites it as a flag when it prints the message; a prompt file's row, as its field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

OPTION = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def rename_options(
    text: str, names: Mapping[str, str], write: Callable[[str, str | None], str], verbatim: Iterable[str] = ()
) -> str:
    """The text with each option of `names` as `write(new name, value)`; value None: the option stands alone.

    `verbatim`: the user's own words, whose backticks are no marks of options.
    """
    if "`" not in text:
        return text
    words = sorted({word for word in verbatim if "`" in word}, key=len, reverse=True)
    for place, word in enumerate(words):
        text = text.replace(word, f"\0{place}\0")
    text = OPTION.sub(lambda found: write(names[found[1]], found[2]) if found[1] in names else found[0], text)
    for place, word in enumerate(words):
        text = text.replace(f"\0{place}\0", word)
    return text


def as_flag(flag: str, value: str | None) -> str:
    """An option as the command line takes it: `--max-length 5`, `--force`, `--no-verify`."""
    if value in (None, "True"):
        return flag
    return f"--no-{flag[2:]}" if value == "False" else f"{flag} {value}"


def as_field(name: str, value: str | None) -> str:
    """An option as the field of a JSON object: `field max_tokens 5`."""
    return f"field {name}" if value is None else f"field {name} {value}"


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """At most three names that an unknown word may stand for: those that begin with it, else the most similar one.

    A word of four letters or fewer has the first letter of a similar name: v100 does not stand for h100.
    """
    by_lower = {name.lower(): name for name in names}
    word = word.strip().lower()
    longer = [name for name in by_lower if len(word) > 1 and name.startswith(word)]
    shorter = [name for name in by_lower if word.startswith(f"{name}-")]
    possible = [name for name in by_lower if len(word) > 4 or name[:1] == word[:1] or word in name]
    alike = longer or shorter or difflib.get_close_matches(word, possible, 1, cutoff)
    return tuple(by_lower[name] for name in alike[:3])


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'? `, for the rest of the sentence to follow; empty without names."""
    listed = " or ".join(map(repr, names))
    return f"did you mean {listed}? " if listed else ""
