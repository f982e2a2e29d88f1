"""Folders that environment variables name: the cache, which can be deleted at any time, and kept profiles."""

from __future__ import annotations

import os
from pathlib import Path

from partita.errors import UsageError

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


def profiles_folder() -> Path | None:
    """The folder in which profiles are kept, created; None if they are not. Raises UsageError if it is unusable."""
    given = os.environ.get(PROFILES_VARIABLE)
    if not given:
        return None
    return usable_folder(given, PROFILES_VARIABLE)


def usable_folder(given: str, setting: str) -> Path:
    """A writable folder, created if needed. Raises UsageError, which names its setting."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise UsageError(f"{setting}={given}: {why}; name a writable folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{setting}={given}: not writable; name a writable folder")
    return folder
