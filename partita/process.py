"""Memory of a process as the operating system reports it, in bytes."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes(process: int | None = None) -> int:
    """Peak resident memory of a process (None: this process); of another process on macOS, its current size.

    On Linux from VmHWM of /proc: ru_maxrss of getrusage(2) includes the peak of the parent before exec. The current
    size is a lower bound, because Linux counts the two separately.
    """
    if sys.platform == "win32":
        return int(psutil.Process(process).memory_info().peak_wset)
    present = int(psutil.Process(process).memory_info().rss)
    if sys.platform == "linux" and (peak := _status("VmHWM", process)) is not None:
        return max(peak, present)
    if process is not None:
        return present
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak if sys.platform == "darwin" else peak * 1024, present)


def give_back() -> None:
    """Run the garbage collector and `trim`."""
    gc.collect()
    trim()


def trim() -> None:
    """Return freed memory of the C library to the system, with malloc_trim(3) of glibc."""
    if sys.platform == "linux" and (give := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give(0)


def anonymous_bytes() -> int | None:
    """Resident memory that is not backed by a file; None if the system does not report it."""
    return _status("RssAnon")


def address_space_free() -> float:
    """Address space left below RLIMIT_AS (`ulimit -v`); infinite without a limit. An upper bound of usable memory."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return max(0, limit - int(psutil.Process().memory_info().vms))


def _status(wanted: str, process: int | None = None) -> int | None:
    """A field of /proc/PID/status in bytes, see proc_pid_status(5); None if it is missing, as in some sandboxes."""
    try:
        lines = Path(f"/proc/{process or 'self'}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None
