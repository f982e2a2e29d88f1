"""The options of every verb: type, default, range and help of each, in one place.

A verb's options are a frozen dataclass. The command line is built from it (`partita.commands.build`), functions of the
Python API take its fields as arguments, and rows of prompt files and bodies of the server are checked by it. Groups of
options that verbs share are base classes. Imports nothing heavy.
"""

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from partita.errors import UsageError
from partita.spelling import spelled

T = TypeVar("T")

PathText: TypeAlias = str | os.PathLike[str]
Value: TypeAlias = str | int | float | bool
MAX_TOKENS = 1 << 24
MAX_SEED = (1 << 64) - 1
MOST_BITS = 1023
"""Bits of an integer that a message can show, and that a float can hold."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that an option takes."""

    least: float = -math.inf
    most: float = math.inf
    words: str = ""
    """How a message says it; empty: from the limits."""
    above: float = -math.inf
    """Lower limit that is itself outside."""
    also: float | None = None
    """A value outside of the limits that is allowed."""

    def __contains__(self, value: float) -> bool:
        """NaN is in no range."""
        if value == self.also:
            return True
        return self.least <= value <= self.most and (value > self.above or self.above == -math.inf)

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.most == math.inf:
            return f"{self.least:,} or more"
        if self.above > -math.inf:
            return f"above {self.above:g} and at most {self.most:,}"
        return f"between {self.least:,} and {self.most:,}"


TOKENS = Range(1, MAX_TOKENS)
COUNT = Range(0)


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line and the checks know of a field. A field without one is for Python alone."""

    help: str
    flags: tuple[str, ...] = ()
    """Default: `--name`, or `--no-name` for a switch that is on."""
    metavar: str | None = None
    range: Range | None = None
    choices: tuple[str, ...] = ()
    complete: str = ""
    """Function of `partita.commands.completion` that completes the value."""
    text: str = ""
    """Parser of `partita.commands.build` for the text of the command line. Default: by type."""
    positional: bool = False
    argument: str = ""
    """Name of the Python argument, where the field has another."""
    views: str = ""
    """Folder of the views that `--view` names."""


@dataclass(frozen=True, slots=True)
class SamplingOption(Option):
    """An option that decides which token comes next."""

    off: float | None = None
    """The value that changes nothing."""
    suggested: float | None = None
    """What transformers' `generate` uses where a checkpoint samples and says nothing."""
    drawn: bool = True
    """Greedy decoding does not use it."""


@dataclass(frozen=True, slots=True)
class Described:
    """A field of an options dataclass."""

    name: str
    type: Any
    """Without None."""
    optional: bool
    """None is allowed."""
    option: Option
    field: Field[Any]

    @property
    def argument(self) -> str:
        """Name in messages, as `spelled` takes it."""
        return self.option.argument or self.name

    @property
    def several(self) -> bool:
        """Whether it holds several values, each given by its own option."""
        return get_origin(self.type) in (Sequence, Mapping)

    @property
    def is_path(self) -> bool:
        """Whether it names a file or folder."""
        return bool(self.type == PathText)


@cache
def described(cls: type[Any]) -> tuple[Described, ...]:
    """The options of a dataclass, in their order, without the fields that have no `Option`."""
    hints = get_type_hints(cls, include_extras=True)
    found = [field for field in fields(cls) if _is_option(hints[field.name])]
    return tuple(_describe(field, *get_args(hints[field.name])) for field in found)


def _is_option(hint: Any) -> bool:
    return bool(get_origin(hint) is Annotated and isinstance(get_args(hint)[1], Option))


def _describe(field: Field[Any], hint: Any, option: Option) -> Described:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    given = tuple(part for part in parts if part is not NoneType)
    return Described(field.name, given[0] if len(given) == 1 else Union[given], NoneType in parts, option, field)  # noqa: UP007


def checked(options: T) -> T:
    """The options with paths as Path, sequences as tuples and mappings as dicts.

    Raises UsageError, which names the option, for a value of another type or out of range.
    """
    changed = {}
    cls: Any = type(options)
    for each in described(cls):
        value = getattr(options, each.name)
        if value is None and each.optional:
            continue
        found = _checked(each, value)
        if found is not value:
            changed[each.name] = found
    return replace(options, **changed) if changed else options  # type: ignore[type-var]


def _checked(each: Described, value: Any) -> Any:
    """The value of one option as the code behind it takes it. Raises UsageError."""
    if each.is_path:
        return _typed(each, value, (str, os.PathLike), "a path", Path)
    if each.several:
        return _several(each, value)
    if each.type is bool:
        return _typed(each, value, bool, "True or False")
    if each.type is str:
        found = _typed(each, value, str, "a string")
        return _chosen(each, found)
    if each.type not in (int, float):
        return value
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UsageError(f"{spelled(each.argument)} is an integer of more than 300 digits, which no option takes")
    if isinstance(value, bool) or not isinstance(value, int if each.type is int else (int, float)):
        kind = "an integer" if each.type is int else "a number"
        raise UsageError(f"{spelled(each.argument)} is {value!r}; it must be {kind}")
    if each.option.range is not None and value not in each.option.range:
        raise UsageError(f"{spelled(each.argument)} is {value}; it must be {each.option.range}")
    return value


def _typed(each: Described, value: Any, kind: Any, words: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """The value, converted unless it is so already. Raises UsageError where it is of another type."""
    if not isinstance(value, kind):
        raise UsageError(f"{spelled(each.argument)} is {value!r}; it must be {words}")
    return value if convert is None or isinstance(value, convert) else convert(value)  # type: ignore[arg-type]


def _several(each: Described, value: Any) -> Any:
    if get_origin(each.type) is Mapping:
        return _typed(each, value, Mapping, "a mapping", dict)
    if isinstance(value, (str, bytes)):
        raise UsageError(f"{spelled(each.argument)} must be a list of strings, not the string {value!r}")
    found = _typed(each, value, Sequence, "a list", tuple)
    path = get_args(each.type)[0] == PathText
    return tuple(map(Path, found)) if path and not all(isinstance(entry, Path) for entry in found) else found


def _chosen(each: Described, value: str) -> str:
    choices = each.option.choices
    if choices and value not in choices:
        allowed = f"the only value is {choices[0]}" if len(choices) == 1 else f"choose one of {', '.join(choices)}"
        raise UsageError(f"{spelled(each.argument, value)}: {allowed}")
    return value


def group(options: Any, cls: type[T]) -> T:
    """The fields of `options` that a smaller dataclass has, as one of these."""
    return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})  # type: ignore[arg-type]


# --- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and how many. None: not given, which is greedy, or as the checkpoint suggests."""

    temperature: Annotated[
        float | None,
        SamplingOption(
            "0 (default) always takes the most likely token; from 0.001 to 100, higher values are more random.",
            ("--temperature", "--temp", "-t"),
            range=Range(1e-3, 100, "0 (greedy) or from 0.001 to 100", also=0),
            off=0.0,
            suggested=1.0,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        SamplingOption(
            "Sample from the k most likely tokens; 0 (default) turns this off.",
            range=Range(0, words="0 (off) or more"),
            off=0,
            suggested=50,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        SamplingOption(
            "Sample from the most likely tokens that add up to this probability; 1 (default) turns this off.",
            range=Range(most=1, above=0, words="above 0 and at most 1 (off)"),
            off=1.0,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        SamplingOption(
            "Drop tokens below this fraction of the most likely token's probability; 0 (default) turns this off.",
            range=Range(0, 1, "from 0 (off) to 1"),
            off=0.0,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        SamplingOption(
            "From 0.01 to 100; above 1 (default) tokens that already occurred are less likely.",
            range=Range(0.01, 100, "from 0.01 to 100 (1: off)"),
            off=1.0,
            drawn=False,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "Seed of the sampler, to reproduce a run. Default: random, and printed.",
            ("--seed", "-s"),
            range=Range(0, MAX_SEED, "from 0 to 2**64 - 1"),
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens to generate. Default: 128.",
            ("--max-new-tokens", "-n"),
            range=TOKENS,
        ),
    ] = None
    source: Annotated[
        str | None,
        Option(
            "Sample as the checkpoint's generation_config.json suggests; options given explicitly take precedence.",
            ("--sampling",),
            metavar="checkpoint",
            choices=("checkpoint",),
            complete="samplings",
            argument="sampling",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Numbers of other libraries become Python's own."""
        for name, value in self.figures().items():
            if hasattr(value, "ndim") or not isinstance(value, (int, float, NoneType)):
                object.__setattr__(self, name, _number(value))

    def figures(self) -> dict[str, Any]:
        """The options as a dict, without `source`."""
        return {each.name: getattr(self, each.name) for each in described(Sampling) if each.name != "source"}

    def over(self, other: Self) -> Self:
        """This one, with the values of `other` where it has none."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(other, **given)


def _number(value: Any) -> Any:
    """A number of another library as Python's own; what is none as it is."""
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value) if hasattr(value, "__index__") else value


def sampling_options() -> Iterator[tuple[str, SamplingOption]]:
    """Name and description of every option that decides which token comes next."""
    return ((each.name, each.option) for each in described(Sampling) if isinstance(each.option, SamplingOption))


GREEDY = Sampling(**{name: option.off for name, option in sampling_options()})  # type: ignore[arg-type]
"""Every option off."""
