"""Where torch keeps what it compiles while a command runs. It has to be said before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from partita.files import temporary_directory

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Read by torch when it is imported (torch/_inductor/runtime/cache_dir_utils.py)."""


@contextmanager
def own_compile_cache() -> Iterator[None]:
    """A folder for torch's compile cache that goes with the command; whoever names one keeps it.

    torch makes `TMPDIR/torchinductor_USER` as soon as it is imported, and leaves it there. An export compiles nothing.
    """
    if VARIABLE in os.environ:
        yield
        return
    with temporary_directory() as folder:
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[VARIABLE]
