"""Who hears what there is to say along the way: a program's log by default, a terminal where a verb passes one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

LOGGER = logging.getLogger("partita")
"""Silent until a program sets up logging: Python would print warnings of a library that has no handler."""
LOGGER.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Audience:
    """What is told while something runs. Functions that may take long take one of these."""

    note: Callable[[str], object] = LOGGER.warning
    """Hears a sentence that the user should know of, while or before a result comes."""
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Is entered while something takes long, with words for what it is."""


QUIET = Audience()
