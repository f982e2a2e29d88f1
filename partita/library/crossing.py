"""Errors on their way out of a child process: as data there, raised again here; and the line that ends the questions.

An error crosses as the nearest class of `partita.errors` with all that this class takes by name, whatever that is: a
class that is added there, or a field, needs nothing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter

import partita.errors as errors
from partita.errors import PartitaError, public_class
from partita.extras import explain
from partita.library.edge import of_system

FAREWELL = "that is all\n"
"""The line after which no question comes, and the parent still is there."""


def told(error: Exception) -> dict[str, Any]:
    """An exception as data: ours as what it is, a library that is missing as what brings it, and others by name."""
    ours = error if isinstance(error, PartitaError) else of_system(error) or explain(error, foreign=True)
    if ours is None:
        ours = PartitaError(f"internal error: {type(error).__name__}: {error}")
    kind = public_class(ours)
    fields = {name: adapter.dump_python(getattr(ours, name), mode="json") for name, adapter in _named(kind).items()}
    return {"type": kind.__name__, "said": ours.said, "fields": fields, "exit_code": ours.exit_code}


def rebuilt(given: Mapping[str, Any]) -> PartitaError:
    """What `told` made data of, as the class it was."""
    kind: type[PartitaError] = getattr(errors, given["type"])
    fields = {name: adapter.validate_python(given["fields"][name]) for name, adapter in _named(kind).items()}
    error = kind(given["said"], **fields)
    error.exit_code = given["exit_code"]
    return error


def _named(kind: type[PartitaError]) -> dict[str, TypeAdapter[Any]]:
    """What a class takes by name, with what makes data of it."""
    hints = get_type_hints(kind.__init__)
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {each.name: TypeAdapter(hints[each.name]) for each in parameters if each.kind is each.KEYWORD_ONLY}


def raise_told(given: Mapping[str, Any] | None) -> None:
    """Raise what `told` made data of; nothing for None."""
    if given is not None:
        raise rebuilt(given)
