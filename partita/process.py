"""This process: its memory in bytes, and standard streams that were closed when it started (`partita ... >&-`).

psutil is imported when it is used, because the command line imports this module first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path


def rss_bytes() -> int:
    """Resident memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes(process: int | None = None) -> int:
    """Peak resident memory of a process (None: this process); of another process on macOS, its current size.

    On Linux from VmHWM of /proc: ru_maxrss of getrusage(2) includes the peak of the parent before exec. The current
    size is a lower bound, because Linux counts the two separately.
    """
    import psutil

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

    import psutil

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return max(0, limit - int(psutil.Process().memory_info().vms))


def free_bytes() -> float:
    """Available memory in bytes, within the container's and the process's limit (ulimit -v)."""
    import psutil

    return min(psutil.virtual_memory().available, _cgroup_bytes_free(), address_space_free())


def _cgroup_bytes_free() -> float:
    """Memory left in the container's limit (Linux cgroup v2), in bytes; infinite without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return float("inf")
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return int(limit) - int((root / "memory.current").read_text()) + cached
    except (OSError, ValueError):
        return float("inf")


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


STDIN, STDOUT, STDERR = range(3)
own_process = False
"""Whether this process is a command or worker of Partita, in which file descriptors may be redirected."""


def open_null_device() -> None:
    """Open the null device in place of closed streams, so that no other file gets their descriptors.

    Python sets a closed stream to None and sends `print(file=sys.stderr)` to stdout.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        fill(descriptor, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def fill(descriptor: int, mode: int) -> None:
    """Open a closed descriptor on the null device."""
    with suppress(OSError):
        os.fstat(descriptor)
        return
    null = os.open(os.devnull, mode)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)


def drop_output(descriptor: int) -> None:
    """Redirect descriptor 1 or 2 to the null device, because Python flushes at exit and would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
