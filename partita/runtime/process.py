"""Memory of this process, as the operating system accounts for it, in bytes."""

from __future__ import annotations

import sys

import psutil


def rss_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident memory of the process so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
