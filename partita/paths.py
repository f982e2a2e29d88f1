"""Where Partita keeps what it can make again: answers of experiments, stubs of a dry run. Imports nothing of ours.

The folder can be deleted at any time.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "PARTITA_CACHE_DIR"
"""A folder to keep it all in; empty: nothing is kept."""
NAME = "partita"


def cache_folder(kind: str) -> Path | None:
    """The folder for one kind of things, which need not exist; None when nothing is to be kept, or there is no place.

    `PARTITA_CACHE_DIR` if it is set, else what the system has for caches of this user: `$XDG_CACHE_HOME` or `~/.cache`,
    `~/Library/Caches` on macOS, `%LOCALAPPDATA%` on Windows.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given is not None:
        return Path(given) / kind if given else None
    import platformdirs

    try:
        folder = platformdirs.user_cache_path(NAME, appauthor=False, opinion=False) / kind
    except (OSError, RuntimeError, ValueError):  # a user without a home; Windows without the folder or its registry
        return None
    return folder if folder.is_absolute() else None
