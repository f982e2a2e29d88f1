"""How a text file that somebody else wrote is read: whole, unless its size is absurd; and what is a number in it.

The configurations, tokenizers, templates and indices of a model are read into memory before anybody knows what is in
them. The largest tokenizer.json that is known has 33 MB (Gemma 3).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

LARGEST_BYTES = 128 << 20


def read_capped(path: Path) -> str:
    """The text in a file, UTF-8. Raises OSError, and ValueError for one that is too large or no text."""
    check_size(path)
    return path.read_text(encoding="utf-8")


def read_json_value(path: Path) -> Any:
    """The JSON value in a file. Raises OSError, and ValueError for one that is too large or no JSON."""
    return parsed(read_capped(path))


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, or is nested deeper than Python follows."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_size(path: Path) -> None:
    """Raise ValueError for a text file that is too large, before another library reads it; OSError as it comes."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{size:,} bytes, and a text file of a model has {LARGEST_BYTES:,} at most")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a number to compute with: no truth value, not infinite, and no integer of hundreds of
    digits, which no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
