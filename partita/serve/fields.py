"""Readers of the fields of a body: each takes a JSON value and the field's name, and gives the value or an ApiError.

What is wrong is said as OpenAI's API says it, one thing at a time, with the field in `param`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from partita.runtime.stop_strings import MOST_CHARACTERS
from partita.serve.api_errors import ApiError, invalid

Reader = Callable[[Any, str], Any]
SHOWN = 60
"""Characters of a value that a message repeats."""
MOST_STOPS = 16
MOST_STOP_TOKENS = 1024
"""Each of them is looked up, and travels with the request."""
JSON_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def json_type(value: Any) -> str:
    """What a value is, in the words of JSON."""
    return JSON_TYPES.get(type(value), "something else")


def shown(value: Any) -> str:
    """A value as a message repeats it."""
    said = repr(value)
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}..."


def wrong_type(name: str, expected: str, value: Any) -> ApiError:
    """A value of another type than the field has."""
    return invalid(
        f"Invalid type for '{name}': expected {expected}, but got {json_type(value)} instead.", name, "invalid_type"
    )


def text(value: Any, name: str) -> str:
    """A string that can be written as UTF-8: JSON can hold half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            f"Invalid '{name}': character {error.start} is half of a surrogate pair, which is no text.", name
        ) from error
    return value


def flag(value: Any, name: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def whole(least: int, most: int) -> Reader:
    """An integer in a range, both ends included."""

    def read(value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, "an integer", value)
        return int(_within(value, name, least, most))

    return read


def number(least: float, most: float, *, or_zero: bool = False) -> Reader:
    """A number in a range, both ends included; `or_zero`: or 0."""

    def read(value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(name, "a number", value)
        return 0.0 if or_zero and value == 0 else float(_within(value, name, least, most, "0 or " if or_zero else ""))

    return read


def _within(value: float, name: str, least: float, most: float, other: str = "") -> float:
    if not least <= value <= most:
        expected = f"expected {other}a value from {_exact(least)} to {_exact(most)}"
        raise invalid(f"Invalid '{name}': {expected}, but got {shown(value)} instead.", name)
    return value


def _exact(value: float) -> str:
    """The end of a range: of integers every digit."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def stops(value: Any, name: str) -> tuple[str, ...]:
    """One stop string, or some of them."""
    each = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in each):
        raise wrong_type(name, "a string or an array of strings", value)
    if len(each) > MOST_STOPS:
        raise invalid(f"Invalid '{name}': {len(each)} stop strings, and at most {MOST_STOPS} are taken.", name)
    for entry in each:
        if not text(entry, name):
            raise invalid(f"Invalid '{name}': a stop string is empty.", name)
        if len(entry) > MOST_CHARACTERS:
            raise invalid(
                f"Invalid '{name}': {len(entry):,} characters, and at most {MOST_CHARACTERS:,} are taken.", name
            )
    return tuple(each)


def ids(value: Any, name: str) -> tuple[int, ...]:
    """Tokens to stop at, by their ids."""
    if not isinstance(value, list) or not all(is_id(entry) for entry in value):
        raise wrong_type(name, "an array of token ids", value)
    if len(value) > MOST_STOP_TOKENS:
        raise invalid(f"Invalid '{name}': {len(value):,} tokens, and at most {MOST_STOP_TOKENS:,} are taken.", name)
    return tuple(value)


def is_id(value: Any) -> bool:
    """Whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def ignored(value: Any, name: str) -> None:
    """Something for the provider of a service, which changes nothing of the answer."""


def lacking(value: Any, name: str) -> None:
    """A field of OpenAI's that asks for what this server does not have, whatever its value."""
    raise ApiError(
        400,
        f"Unsupported parameter: '{name}'; this server does not have what it asks for; leave it out.",
        param=name,
        code="unsupported_parameter",
    )


def only(*values: Any) -> Reader:
    """A field of which this server has some values alone; others would change the answer, and so are refused."""

    allows = _with_floats(values)

    def read(value: Any, name: str) -> None:
        if not any(type(value) is type(good) and value == good for good in allows):
            allowed = " or ".join(shown(good) for good in values)
            raise ApiError(
                400,
                f"Unsupported value: '{name}' is {shown(value)}, and this server has {allowed} alone; leave it out.",
                param=name,
                code="unsupported_value",
            )

    return read


def _with_floats(values: Sequence[Any]) -> list[Any]:
    """Zero is written as 0 and as 0.0."""
    return [*values, *(float(value) for value in values if isinstance(value, int) and not isinstance(value, bool))]
