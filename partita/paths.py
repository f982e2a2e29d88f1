"""The cache folder of Partita (probe outcomes, stubs of dry runs), which can be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "PARTITA_CACHE_DIR"
"""Environment variable with the cache folder; set but empty: no caching."""
PROFILES_VARIABLE = "PARTITA_PROFILES"
"""Environment variable with a folder in which ONNX Runtime's profiles of observed sessions are kept."""
NAME = "partita"


def cache_folder(kind: str) -> Path | None:
    """The cache folder of a kind, which may not exist yet; None if caching is off or there is no cache folder.

    `PARTITA_CACHE_DIR`, else the user's cache folder: `$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches` on macOS,
    `%LOCALAPPDATA%` on Windows.
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
