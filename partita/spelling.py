"""How messages and commands are written for whoever reads them: a shell's user, or the author of a Python program.

A message names an argument by `spelled("max_length", 5)`, in which the name is that of the argument of the function:
the command line reads `--max-length 5`, a program `max_length=5`. Who reads is known to the block that runs
(`read_by`), so nothing that raises an error has to be told, and nobody rewrites a message afterwards. What stands in an
object of JSON, such as a row of a file, is named as it is there (`read_as_fields`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal

Reader = Literal["shell", "python"]
NOT_GIVEN: Final = object()
SEVERAL = {
    "pins": "--pin",
    "provider_options": "--provider-option",
    "target_options": "--provider-option",
    "provider_libraries": "--provider-library",
    "target_libraries": "--provider-library",
    "shapes": "--shape",
    "inputs": "--input",
    "requirements": "--require",
}
"""Arguments that hold several values -> the option that is given once for each."""
PAIRS = frozenset({"keep"})
"""Arguments that are a dictionary, and on the command line one option with NAME=VALUE,NAME=VALUE."""
OTHER = {
    "providers": "--provider",
    "chains": "--provider",
    "reports": "--report",
    "timeout_seconds": "--timeout",
    "cache_in_place": "--require-cache-in-place",
    **SEVERAL,
}
"""Arguments whose option has another name than they."""
ARGUMENTS = {flag: name for name, flag in reversed(OTHER.items())}
OF_EXPORT = {"provider_options": "target_options", "provider_libraries": "target_libraries"}
"""What `export` calls what others call so: it has no chain, only a target."""
FUNCTIONS = ("export", "place", "providers")
"""Verbs that are functions of `partita` with the same arguments."""
NO_ARGUMENTS = frozenset({"--json", "--token-ids", "--report"})
"""Options of the command line that are no argument of a function."""

_reader: ContextVar[Reader | None] = ContextVar("partita_reader", default=None)
_fields: ContextVar[Mapping[str, str] | None] = ContextVar("partita_fields", default=None)


@contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Write what is said in this block for `reader`. The outermost block decides: a verb that calls a function of the
    library still speaks to whoever typed the verb.
    """
    before = _reader.set(_reader.get() or reader)
    try:
        yield
    finally:
        _reader.reset(before)


def reader() -> Reader:
    """For whom is written now; a shell's user where nobody said."""
    return _reader.get() or "shell"


@contextmanager
def read_as_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name arguments as the fields of an object from which they are read in this block: argument -> field. What the
    object has not is named as before: it comes from whoever gave the object.
    """
    before = _fields.set(names)
    try:
        yield
    finally:
        _fields.reset(before)


def called(name: str) -> str:
    """An argument by its name in Python, or by that of its field."""
    return (_fields.get() or {}).get(name, name)


def either(shell: str, python: str) -> str:
    """One of two ways to write something."""
    return shell if reader() == "shell" else python


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


def flag_of(name: str) -> str:
    """The option of the command line that an argument is: `--max-length` for max_length."""
    return OTHER.get(name, f"--{name.replace('_', '-')}")


def spelled(name: str, value: object = NOT_GIVEN) -> str:
    """An argument as its reader writes it, alone or with what was given for it, of several values one.

    `name` is that of the argument in Python. A switch is given as True or False: `--force`, `--no-verify`.
    """
    field = (_fields.get() or {}).get(name)
    if field is not None:
        return f"field {field}" if value is NOT_GIVEN else f"field {field} {json.dumps(value, ensure_ascii=False)}"
    flag = flag_of(name)
    if value is NOT_GIVEN:
        return either(flag, name)
    if isinstance(value, bool):
        return either(flag if value else f"--no-{flag[2:]}", f"{name}={value}")
    shown = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if name == "requirements":  # they have no name in a call
        return either(f"{flag} {shown}", f"requirement {shown!r}")
    if name in SEVERAL or name in PAIRS:
        return either(f"{flag} {shown}", f"{name}={_literal(name, shown)!r}")
    return either(f"{flag} {shown}", f"{name}={value!r}" if isinstance(value, str) else f"{name}={shown}")


def _literal(name: str, text: str) -> Any:
    """The value of an argument in Python that the command line writes as `text`; the text, where it is malformed."""
    if name in PAIRS and "=" in text:
        return {key: value for key, _, value in (pair.partition("=") for pair in text.split(","))}
    left, equals, right = text.rpartition("=") if name in ("shapes", "inputs") else text.partition("=")
    if name == "pins":
        return [text]
    if name not in SEVERAL or not equals:
        return int(text) if text.isdecimal() and name not in SEVERAL else text
    if name.endswith("_options"):
        provider, _, key = left.partition(".")
        return {provider: {key: right}} if name == "provider_options" else {key: right}
    if name == "shapes" and all(size.isdecimal() for size in right.split(",")):
        sizes = tuple(map(int, right.split(",")))
        return {left: sizes if len(sizes) > 1 else sizes[0]}
    return {left: right}


def arguments(words: Sequence[str], *, of_export: bool = False) -> str:
    """Words of a command line as arguments of a call: `'PATH', providers='cpu', dry_run=True`."""
    unnamed: list[str] = []
    named: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            unnamed.append(repr(word))
        elif word not in NO_ARGUMENTS:
            name = ARGUMENTS.get(word, word[2:].replace("-", "_"))
            name = OF_EXPORT.get(name, name) if of_export else name
            if not rest or rest[0].startswith("--"):
                positive = not name.startswith("no_")
                named[name.removeprefix("no_")] = positive
            else:
                named[name] = _joined(named.get(name), _literal(name, rest.pop(0)))
    return ", ".join([*unnamed, *(f"{name}={value!r}" for name, value in named.items())])


def _joined(before: Any, value: Any) -> Any:
    """Several values of one argument as one."""
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{key: _joined(before.get(key), entry) for key, entry in value.items()}}
    return [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def as_call(words: Sequence[str]) -> str | None:
    """A command line of ours as a call of the function that does the same; None where there is none."""
    if len(words) < 2 or words[0] != "partita" or words[1] not in FUNCTIONS:
        return None
    return f"partita.{words[1]}({arguments(words[2:], of_export=words[1] == 'export')})"
