"""Memory of this process, as the operating system accounts for it, in bytes; for export and for runtime."""

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
    """Largest resident memory of the process so far; None: of this one. Of another one it is known on Linux and
    Windows; elsewhere it is the present size.

    On Linux from VmHWM of /proc, which starts anew with a program; ru_maxrss of getrusage(2) would begin with the peak
    of the process that started this one. Linux accounts for the peak and for the present in different places; the
    larger one wins, so that no peak is below what was seen.
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
    """Collect what is not used any more, and have the C library give freed memory back to the system, where it can.

    glibc keeps what it once had for later use: after a model was let go, more than half of it stayed resident.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Have the C library give freed memory back to the system, where it can."""
    if sys.platform == "linux" and (give := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give(0)


def anonymous_bytes() -> int | None:
    """Resident memory that is of no file: what was allocated, and not mapped. None where the system does not say."""
    return _status("RssAnon")


def address_space_left() -> float:
    """What RLIMIT_AS (`ulimit -v`) leaves this process; infinite without a limit, or where the system has none.

    Much of an address space is never touched, so less can be had: it is a bound.
    """
    if sys.platform == "win32":
        return float("inf")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return max(0, limit - int(psutil.Process().memory_info().vms))


def _status(wanted: str, process: int | None = None) -> int | None:
    """A line of /proc/PID/status, see proc_pid_status(5); None where there is no such line, as in some sandboxes."""
    try:
        lines = Path(f"/proc/{process or 'self'}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None
