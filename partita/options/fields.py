"""Options as fields of a frozen dataclass: type, default, range and help of each, and how values are checked.

The command line is built from these dataclasses (`partita.commands.build`), functions of the Python API take their
fields as arguments, and they check rows of prompt files and requests of the server. Imports nothing heavy.
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from numbers import Number
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from partita.errors import UsageError
from partita.messages import as_flag, rename_options

T = TypeVar("T")
PathText: TypeAlias = str | os.PathLike[str]
Value: TypeAlias = str | int | float | bool
MAX_TOKENS = 1 << 24
MAX_THREADS = 1024
DAY_SECONDS = 86_400
WEEK_SECONDS = 7 * DAY_SECONDS
MAX_COUNT = 1 << 20
MAX_SEED = (1 << 64) - 1
OUTPUT = "Output"
"""Heading of options in the help; their paths are written."""
MODEL = "model"
"""`Option.text` of a path or hub id."""
MOST_BITS = 1023
"""Bits of an integer that a message can show, and that a float can hold."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that an option accepts."""

    minimum: float = -math.inf
    maximum: float = math.inf
    text: str = ""
    """Text in messages; empty: from the limits."""
    above: float = -math.inf
    """Exclusive lower limit."""
    extra_value: float | None = None
    """An allowed value outside the limits."""

    def __contains__(self, value: float) -> bool:
        """NaN is in no range."""
        if value == self.extra_value:
            return True
        return self.minimum <= value <= self.maximum and (value > self.above or self.above == -math.inf)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.maximum == math.inf:
            return f"{self.minimum:,} or more"
        if self.above > -math.inf:
            return f"above {self.above:g} and at most {self.maximum:,}"
        return f"between {self.minimum:,} and {self.maximum:,}"


TOKENS = Range(1, MAX_TOKENS)
COUNT = Range(0)
NUMBER = Range(0, sys.float_info.max, "a number that is 0 or more")


@dataclass(frozen=True, slots=True)
class Option:
    """Description of a field for the command line and the checks. Fields without one exist in Python only."""

    help: str
    flags: tuple[str, ...] = ()
    """Default: `--name`, or `--no-name` for a switch that is on, and `short`."""
    short: str | None = None
    metavar: str | None = None
    """Default for a path: FILE."""
    range: Range | None = None
    choices: tuple[str, ...] = ()
    complete: Literal["", "chains", "providers", "views"] = ""
    """What completes the value in a shell. Default: `choices`."""
    text: str = ""
    """Parser of `partita.commands.build` for the text of the command line. Default: by type."""
    positional: bool = False
    argument: str = ""
    """Name in messages. Default: that of the field."""
    group: str = ""
    """Heading in the help. Default: `HELP_GROUP` of the class that declares the field; empty: the last one."""
    off_value: float | None = None
    """Of a sampling option: the value that turns it off; None for other options."""
    suggested: float | None = None
    """Of a sampling option: default of transformers' `generate` for a checkpoint that samples."""
    sampling_only: bool = True
    """Of a sampling option: greedy decoding does not use it."""
    name: str = ""
    """This and the next three: set by `describe_fields`."""
    type: Any = None
    """Type without None."""
    optional: bool = False
    """None is allowed."""
    default: Any = field(default_factory=lambda: MISSING)

    @property
    def is_model(self) -> bool:
        """Whether the value is a path or a hub id. Its text stays as it is: only `./name` names a folder."""
        return self.text == MODEL

    @property
    def flag(self) -> str:
        """Name on the command line, of a switch that is on by default without `no-`."""
        own = next((flag for flag in self.flags if not flag.startswith("--no-")), None)
        return own or f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether it holds several values, each given by its own option."""
        return get_origin(self.type) in (Sequence, Mapping)

    @property
    def is_path(self) -> bool:
        """Whether it names a file or folder."""
        return bool(self.type == PathText)


def option(help: str, *, default: Any = None, **settings: Any) -> Any:
    """A field with an `Option` of these settings. A type that several classes share is Annotated with one instead."""
    return field(default=default, metadata={"option": Option(help, **settings)})


def _describe_fields(cls: type[Any]) -> tuple[Option, ...]:
    hints, described = get_type_hints(cls, include_extras=True), []
    for each in fields(cls):
        hint, found = hints[each.name], each.metadata.get("option")
        if get_origin(hint) is Annotated:
            hint, found = get_args(hint)
        if isinstance(found, Option):
            declaring = next(base for base in cls.__mro__ if each.name in vars(base).get("__annotations__", {}))
            described.append(_describe(each, hint, found, found.group or vars(declaring).get("HELP_GROUP", "")))
    return tuple(described)


describe_fields: Callable[[Any], tuple[Option, ...]] = functools.cache(_describe_fields)
"""The options of a dataclass, in their order, without the fields that have no `Option`."""


def _describe(field: Field[Any], hint: Any, option: Option, group: str) -> Option:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    given = tuple(part for part in parts if part is not NoneType)
    kind, choices = given[0] if len(given) == 1 else Union[given], option.choices  # noqa: UP007
    if get_origin(kind) is Literal:
        kind, choices = str, choices or get_args(kind)
    facts: dict[str, Any] = {"name": field.name, "type": kind, "optional": NoneType in parts, "default": field.default}
    return replace(option, choices=choices, argument=option.argument or field.name, group=group, **facts)


def check_fields(options: T) -> T:
    """The options with paths as Path, sequences as tuples and mappings as dicts.

    Raises UsageError, which names the option, for a value of another type or out of range.
    """
    changed = {}
    cls: Any = type(options)
    for each in describe_fields(cls):
        value = getattr(options, each.name)
        if value is None and each.optional:
            continue
        found = _checked(each, value)
        if found is not value:
            changed[each.name] = found
    return replace(options, **changed) if changed else options  # type: ignore[type-var]


def check_value(cls: type[Any], name: str, value: Any) -> None:
    """Raise UsageError for a value that an option of a dataclass does not accept."""
    each = next(each for each in describe_fields(cls) if each.name == name)
    if value is not None or not each.optional:
        _checked(each, value)


def _checked(each: Option, value: Any) -> Any:
    """The converted value of one option. Raises UsageError."""
    name = each.argument
    if each.is_path:
        _require(each, value, (str, os.PathLike), "a path")
        return value if each.is_model or isinstance(value, Path) else Path(value)
    if get_origin(each.type) is Mapping:
        _require(each, value, Mapping, "a mapping")
        return value if isinstance(value, dict) else dict(value)
    if each.several:
        if isinstance(value, (str, bytes)):
            raise UsageError(f"`{name}` must be a list of strings, not the string {value!r}")
        _require(each, value, Sequence, "a list")
        path = get_args(each.type)[0] == PathText and not each.is_model
        found = value if isinstance(value, tuple) else tuple(value)
        return tuple(map(Path, found)) if path and not all(isinstance(entry, Path) for entry in found) else found
    if each.type is bool:
        _require(each, value, bool, "True or False")
    if each.type is str:
        _require(each, value, str, "a string")
        if each.choices and value not in each.choices:
            allowed = ", ".join(each.choices)
            only = f"the only value is {allowed}" if len(each.choices) == 1 else f"choose one of {allowed}"
            raise UsageError(f"`{name}={value}`: {only}")
    if each.type not in (int, float):
        return value
    if not isinstance(value, (int, float)) and isinstance(value, Number) and hasattr(value, "item"):
        value = value.item()  # of numpy
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UsageError(f"`{name}` is an integer of more than 300 digits, above the limit of every option")
    if isinstance(value, bool) or not isinstance(value, int if each.type is int else (int, float)):
        raise UsageError(f"`{name}` is {value!r}; it must be {'an integer' if each.type is int else 'a number'}")
    if each.range is not None and value not in each.range:
        raise UsageError(f"`{name}` is {value}; it must be {each.range}")
    return value


def _require(each: Option, value: Any, kind: Any, words: str) -> None:
    """Raise UsageError for a value of another type."""
    if not isinstance(value, kind):
        raise UsageError(f"`{each.argument}` is {value!r}; it must be {words}")


def input_paths(options: Any) -> tuple[Path, ...]:
    """Files and folders that options name as inputs: all paths that are not in the group Output, and values of provider
    options that exist.
    """
    found: list[PathText] = []
    for each in describe_fields(type(options)):
        value = getattr(options, each.name)
        if value is None or each.group == OUTPUT:
            continue
        if each.text == "provider_options":
            texts = (text for settings in value.values() for text in settings.values())
            found += [text for text in texts if isinstance(text, str) and text and os.path.exists(text)]  # noqa: PTH110
        elif each.is_path:
            found.append(value)
        elif each.several and get_args(each.type)[-1] == PathText:
            found += value.values() if isinstance(value, Mapping) else value
    return tuple(map(Path, found))


def path_of(given: PathText | None) -> Path | None:
    """The path of an option that may be missing."""
    return None if given is None else Path(given)


def group(options: Any, cls: type[T]) -> T:
    """An instance of `cls` with its fields from `options`."""
    return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})  # type: ignore[arg-type]


MODULES = ("export", "generation", "groups", "inspection", "placement", "reports")


def option_groups() -> list[type[Any]]:
    """Every dataclass of options."""
    modules = [import_module(f"partita.options.{name}") for name in MODULES]
    values = [each for module in modules for each in vars(module).values()]
    return [each for each in values if isinstance(each, type) and is_dataclass(each)]


@functools.cache
def option_flags() -> Mapping[str, str]:
    """Flag of the command line by the name of the argument, of every option of every verb."""
    found = (each for cls in option_groups() for each in describe_fields(cls))
    return {each.argument: each.flag for each in found if not each.positional}


def with_flags(text: str) -> str:
    """A message with its options as flags: `--max-length 5` for `` `max_length=5` ``."""
    return rename_options(text, option_flags(), as_flag) if "`" in text else text
