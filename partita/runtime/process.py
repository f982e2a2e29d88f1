"""Memory of this process, as the operating system accounts for it, in bytes."""

from __future__ import annotations

import sys

import psutil


def rss_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident memory of the process so far.

    Linux accounts for the peak and for the present in different places; the larger one wins, so that no peak is below
    what was seen.
    """
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak if sys.platform == "darwin" else peak * 1024, rss_bytes())
