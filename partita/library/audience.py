"""Receivers of notes and progress of a running function: the log by default, a terminal for commands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

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
