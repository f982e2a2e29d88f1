"""Where Partita keeps what it can make again: answers of experiments, stubs of a dry run. Imports nothing of ours.

The folder can be deleted at any time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "PARTITA_CACHE_DIR"
"""A folder to keep it all in; empty: nothing is kept."""
NAME = "partita"


def cache_folder(kind: str) -> Path | None:
    """The folder for one kind of things, which need not exist; None when nothing is to be kept, or there is no place.

    `PARTITA_CACHE_DIR` if it is set, else what the system has for caches of this user.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given is not None:
        return Path(given) / kind if given else None
    base = users_caches()
    return None if base is None else base / NAME / kind


def users_caches() -> Path | None:
    """The folder for caches of this user: `%LOCALAPPDATA%`, `$XDG_CACHE_HOME` or `~/.cache`; None when none is known.

    A relative XDG_CACHE_HOME counts for nothing, as its specification says.
    """
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else None
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base)
    with suppress(RuntimeError):
        return Path.home() / ".cache"
    return None
