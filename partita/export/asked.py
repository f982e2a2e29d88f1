"""What an export was asked for, as the options that ask for it again. A manifest keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from partita.export.options import ExportOptions
from partita.spelling import PAIRS

Asked = Mapping[str, tuple[str, ...]]
"""Name of an option of `partita export`, without dashes before it, to the values that it was given; none for a flag."""
_OF_A_PLACE = frozenset({"checkpoint", "out", "force"})
"""Who exports again has them elsewhere."""


def asked_options(options: ExportOptions) -> dict[str, tuple[str, ...]]:
    """Every option that was not left alone. Of files and folders it is the name alone."""
    found = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in _OF_A_PLACE or value == each.default:
            continue
        name = each.name.replace("_", "-")
        values = _values(value)
        found[f"no-{name}" if value is False else name] = (",".join(values),) if each.name in PAIRS else values
    return found


def _values(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, tuple):
        return tuple("=".join(map(_value, each)) if isinstance(each, tuple) else _value(each) for each in value)
    return (_value(value),)


def _value(value: Any) -> str:
    return value.name if isinstance(value, Path) else str(value)
