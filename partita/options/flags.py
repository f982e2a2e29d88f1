"""Options in messages as flags of the command line."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from partita.messages import as_flag, rename_options
from partita.options.fields import describe_fields

MODULES = (
    "bench",
    "drift",
    "export",
    "generation",
    "groups",
    "inspection",
    "placement",
    "plan",
    "reports",
    "sampling",
    "serve",
)


def option_groups() -> list[type[Any]]:
    """Every dataclass of options."""
    modules = [import_module(f"partita.options.{name}") for name in MODULES]
    values = [each for module in modules for each in vars(module).values()]
    return [each for each in values if isinstance(each, type) and is_dataclass(each)]


@functools.cache
def option_flags() -> Mapping[str, str]:
    """Flag of the command line by the name of the argument, of every option of every verb."""
    found = (each for cls in option_groups() for each in describe_fields(cls))
    return {each.argument: each.flag for each in found if not each.option.positional}


def with_flags(text: str) -> str:
    """A message with its options as flags: `--max-length 5` for `` `max_length=5` ``. Words of this process's command
    line stay as they are.
    """
    if "`" not in text:
        return text
    typed = (part for word in sys.argv for part in (word, word.partition("=")[2]))
    return rename_options(text, option_flags(), as_flag, typed)
