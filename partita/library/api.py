"""Decorators and errors of the public Python API, and receivers of its notes: the log by default.

A wrong argument raises `ArgumentError`, which is also a ValueError and a TypeError.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, cast, get_args, get_origin

from partita.errors import PartitaError, ResourceError, UsageError, out_of_memory
from partita.extras import explain
from partita.options.fields import Option, check_fields, describe_fields

P = ParamSpec("P")
T = TypeVar("T")
Options = TypeVar("Options")
Owner = TypeVar("Owner")


class ArgumentError(UsageError, ValueError, TypeError):
    """A function was called with an invalid argument."""


def of_system(error: Exception) -> ResourceError | None:
    """The ResourceError for a memory or system error; None for other errors."""
    if isinstance(error, MemoryError):
        return out_of_memory()
    if not isinstance(error, OSError):
        return None
    reason = f"{error.strerror or error}"
    path = Path(error.filename) if isinstance(error.filename, str) else None
    if isinstance(error, PermissionError) and path is not None:
        return ResourceError(f"{reason}; change its permissions or those of its folder", path=path)
    return ResourceError(f"{reason}; check the disk and its permissions", path=path)


def public_error(error: Exception) -> Exception:
    """The error of the public API: UsageError becomes ArgumentError, system and import errors become PartitaError.

    Other exceptions are returned unchanged.
    """
    if not isinstance(error, PartitaError):
        return of_system(error) or explain(error, foreign=True) or error
    if not isinstance(error, UsageError) or isinstance(error, ArgumentError):
        return error
    return ArgumentError(error.message, path=error.path, remedy=error.remedy)


@contextmanager
def public_errors() -> Iterator[None]:
    """Raise every error as `public_error`."""
    try:
        yield
    except Exception as error:
        ours = public_error(error)
        if ours is error:
            raise
        raise ours from error


def python_values(value: Any) -> Any:
    """The value with numpy and torch numbers and arrays as Python values, including in lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map(python_values, value))
    if type(value) is dict:
        return {key: python_values(entry) for key, entry in value.items()}
    if isinstance(value, range):
        return list(value)
    if isinstance(value, int | str | bytes | bytearray | memoryview | type):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value) if hasattr(value, "__index__") else value


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function or method part of the public API: it accepts numpy numbers and raises PartitaError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Released builds of ONNX Runtime send usage data (its docs/Privacy.md); set the variable to 0 to allow it.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        with public_errors():
            return function(*python_values(args), **python_values(kwargs))

    return call


def from_fields(options: Callable[P, Options]) -> Callable[[Callable[[Options], T]], Callable[P, T]]:
    """A decorator: callers pass the fields of an options dataclass, and the function gets the checked dataclass."""
    return lambda function: _taking(options, function, 0)


def method_from_fields(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], T]], Callable[Concatenate[Owner, P], T]]:
    """`from_fields` for a method, or for a function with another argument before the options."""
    return lambda function: _taking(options, function, 1)


def _taking(options: Callable[..., Any], function: Any, before: int) -> Any:
    """The function with the fields of the options as arguments, after `before` others."""

    @public
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:before], check_fields(options(*args[before:], **kwargs)))

    _describe(call, [*inspect.signature(function).parameters.values()][:before], options, function)
    return call


def _describe(call: Any, first: list[inspect.Parameter], options: Callable[..., Any], function: Any) -> None:
    """Give a function the signature of its options dataclass, and its docstring a line for each argument."""
    parameters = [
        each.replace(annotation=_without_metadata(each.annotation))
        for each in inspect.signature(options).parameters.values()
    ]
    returns = inspect.signature(function).return_annotation
    call.__signature__ = inspect.Signature([*first, *parameters], return_annotation=returns)
    helps = {each.argument: _help_of(each) for each in describe_fields(cast("type[Any]", options))}
    lines = [f"{each.name}: {helps[each.name]}" for each in parameters if each.name in helps]
    wrapped = [textwrap.fill(line, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines]
    call.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Args:", *wrapped]) if lines else function.__doc__


def _help_of(each: Option) -> str:
    """The help text of an option, with the names of arguments in place of options of the command line."""
    text = re.sub(r"--([a-z][a-z-]*)", lambda match: f"`{match[1].replace('-', '_')}`", each.help)
    return f"False: {text[0].lower()}{text[1:]}" if each.default is True else text


def _without_metadata(annotation: Any) -> Any:
    """A type without what the command line knows of it."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


LOGGER = logging.getLogger("partita")
"""Silent until a program configures logging; without a handler, Python would print warnings."""
LOGGER.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Audience:
    """Receives notes and progress of a function that may take long."""

    note: Callable[[str], object] = LOGGER.warning
    """Called with a note for the user, before or with the result."""
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Context manager of a long operation, called with its title."""


QUIET = Audience()
