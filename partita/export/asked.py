"""The options of an export, as recorded in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.options.export import ExportOptions as Options
from partita.options.fields import described

Asked = Mapping[str, tuple[str, ...]]
"""Name of an option of `partita export` without dashes -> its values; empty for a flag."""
_OF_A_PLACE = frozenset({"checkpoint", "out", "force"})
"""Options that are not recorded."""


def asked_options(options: Options) -> dict[str, tuple[str, ...]]:
    """Every option that was set. Files and folders are recorded by name."""
    found = {}
    for each in described(Options):
        value = getattr(options, each.name)
        if each.name in _OF_A_PLACE or value == each.field.default or not (value or value is False):
            continue
        flag = each.flag.removeprefix("--")
        values = _values(value)
        found[f"no-{flag}" if value is False else flag] = (",".join(values),) if each.name == "keep" else values
    return found


def _values(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, Mapping):
        return tuple(text for name, entry in value.items() for text in _pair(name, entry))
    return tuple(map(_value, value)) if isinstance(value, tuple) else (_value(value),)


def _pair(name: str, value: Any) -> list[str]:
    """NAME=VALUE; for options by provider PROVIDER.NAME=VALUE each."""
    if isinstance(value, Mapping):
        return [f"{name}.{option}={entry}" for option, entry in value.items()]
    return [f"{name}={_value(value)}"]


def _value(value: Any) -> str:
    return value.name if isinstance(value, Path) else str(value)
