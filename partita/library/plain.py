"""Numbers and arrays of other libraries as Python's own, wherever a program gives them.

Programs draw seeds, count tokens and choose token ids with numpy, torch and the like.
"""

from __future__ import annotations

import operator
from array import array
from numbers import Real
from typing import Any

from partita.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, memoryview, type(None))


def plain(value: Any) -> Any:
    """The value with Python's own numbers and lists: integers by `__index__`, other real numbers as floats, arrays as
    lists, also within lists, tuples, sets and dicts. What is neither is as it is, and so is a list without them.

    A truth value stays one, and is no integer. Raises UsageError for lists that hold themselves.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise UsageError(
            "a list holds itself, or lists within lists without end; give numbers and flat lists"
        ) from None


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        entries = {key: _plain(entry) for key, entry in value.items()}
        return entries if any(entries[key] is not entry for key, entry in value.items()) else value
    if kind in (list, tuple, set, frozenset):
        found = [_plain(entry) for entry in value]
        return kind(found) if any(new is not old for new, old in zip(found, value, strict=True)) else value
    if isinstance(value, (tuple, range, array)) and not hasattr(value, "_fields"):  # torch.Size, and what lists numbers
        return tuple(_plain(entry) for entry in value)
    return value if isinstance(value, type) else _number(value)


def _number(value: Any) -> Any:
    rank = getattr(value, "ndim", None)
    if isinstance(rank, int):
        own = value.tolist() if hasattr(value, "tolist") else value
        return value if own is None else own  # a masked number is none, which is not what was left out
    if hasattr(value, "__index__"):
        return operator.index(value)
    return float(value) if isinstance(value, Real) else value
