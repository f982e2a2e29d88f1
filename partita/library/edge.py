"""The edge to programs: arguments are checked there, and whatever goes wrong is an error of the one tree.

A wrong argument is an `ArgumentError`, which is a ValueError and a TypeError, too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from partita.errors import PartitaError, ResourceError, UsageError
from partita.extras import explain
from partita.library.plain import plain
from partita.remedies import what_to_do
from partita.spelling import read_by

P = ParamSpec("P")
T = TypeVar("T")
SHOWN = 60
WORDS = {
    "str": "a string",
    "str | None": "a string or None",
    "str | Sequence[str] | None": "a string, a list of strings, or None",
    "bool": "True or False",
    "int": "an integer",
    "int | None": "an integer or None",
    "float": "a number",
    "float | None": "a number or None",
    "Sequence[str]": "a list of strings",
    "Sequence[int]": "a list of integers",
    "str | Sequence[str]": "a string or a list of strings",
    "str | os.PathLike[str]": "a path",
    "str | os.PathLike[str] | None": "a path or None",
    "Providers | None": "a string such as 'webgpu,cpu', or a list of names, each alone or with a dict of options",
    "ProviderOptions | None": "a dict of options for each provider",
    "Libraries | None": "a dict of a path for each provider",
    "TokenIds | None": "token ids",
    "AdapterNames | None": "the name of an adapter, a list with a name or None for each prompt, or None",
    "Process": "'auto', 'this' or 'child'",
    "Chains | None": "a chain, or a list of chains, each a text such as 'webgpu,cpu' or a list of names",
    "Sequence[str | os.PathLike[str]]": "a list of paths",
    "records.Report | None": "a Report or None",
    "records.Report": "a Report",
}
"""What an argument has to be, by its annotation."""


class ArgumentError(UsageError, ValueError, TypeError):
    """A function was called with an argument that makes no sense."""


def of_system(error: Exception) -> ResourceError | None:
    """What is told where memory, or the system, gives out; None for another error."""
    if isinstance(error, MemoryError):
        return ResourceError("out of memory; close other models, or use a smaller one")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = what_to_do(error, "check the disk and its permissions")
        return ResourceError(f"{where}{error.strerror or error}; {remedy}")
    return None


class TheirsError(Exception):
    """Carries what a program's own function raised, its cause, out of what called it."""


@contextmanager
def theirs() -> Iterator[None]:
    """What a program's own function raises, called within this, comes out of everything as it was raised."""
    try:
        yield
    except Exception as error:
        raise TheirsError from error


@contextmanager
def one_tree() -> Iterator[None]:
    """Let nothing out but errors of ours, KeyboardInterrupt, and what else is no Exception.

    What is said meanwhile names the arguments of functions, unless a command line has called.
    """
    try:
        with read_by("python"):
            yield
    except TheirsError as carried:
        assert carried.__cause__ is not None
        raise carried.__cause__ from carried.__cause__.__cause__
    except ArgumentError:
        raise
    except UsageError as error:
        raise ArgumentError(error.said, where=error.where, remedy=error.remedy) from error
    except PartitaError:
        raise
    except (MemoryError, OSError) as error:
        said = of_system(error)
        assert said is not None
        raise said from error
    except Exception as error:
        lacking = explain(error, foreign=True)
        if lacking is not None:
            raise lacking from error
        raise PartitaError(
            f"internal error: {type(error).__name__}: {error}; this is a bug in Partita, the cause shows where"
        ) from error


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function or method one that programs call: its arguments are checked by their annotations."""
    name = function.__qualname__
    signature = inspect.signature(function)
    checked: list[Callable[..., T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Released builds of ONNX Runtime send usage data (its docs/Privacy.md); whoever agrees to that sets it to 0.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        with one_tree():
            if not checked:
                checked.append(_checked(function))
            own = {key: plain(value) for key, value in kwargs.items()}
            return run(name, signature, checked[0], tuple(plain(value) for value in args), own)

    return call


def _checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function with a check of its arguments. Apart from the call: pydantic keeps the names of the frame that asks
    for the check, and the arguments of the first call, a model say, would last as long as the process.
    """
    from pydantic import ConfigDict, validate_call

    return validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))(function)


def run(
    name: str, signature: inspect.Signature, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """Call the function. Raises ArgumentError for arguments that do not fit its signature or its annotations."""
    from pydantic import ValidationError

    try:
        return function(*args, **kwargs)
    except ValidationError as error:
        # A model that is validated within the function has its own title.
        if error.title not in (name, name.rpartition(".")[2]):
            raise
        first = error.errors()[0]
        raise ArgumentError(f"{name}(): {_wrong(signature, first['type'], first['loc'], first['input'])}") from error


def _wrong(signature: inspect.Signature, kind: str, where: tuple[int | str, ...], given: Any) -> str:
    """What is wrong with one argument, as a sentence."""
    names = [name for name in signature.parameters if name != "self"]
    argument = where[0] if where else ""
    if kind == "unexpected_keyword_argument":
        near = difflib.get_close_matches(str(argument), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"there is no argument {argument!r}; {hint}it takes {', '.join(names)}"
    if kind == "unexpected_positional_argument":
        return f"too many positional arguments; it takes {', '.join(names)}"
    if isinstance(argument, int):
        argument = list(signature.parameters)[argument]
    if kind.startswith("missing"):
        return f"the argument {argument!r} is missing"
    annotation = str(signature.parameters[str(argument)].annotation)
    wanted = WORDS.get(annotation, annotation)
    shown = repr(given)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    inside = len(where) > 1 and not isinstance(where[1], str)
    return (
        f"{argument} must be {wanted}; it contains {shown}" if inside else f"{argument} must be {wanted}, not {shown}"
    )
