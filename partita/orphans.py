"""A child process ends when its parent does, even when the parent was killed and could tell it nothing (SIGKILL)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

PARENT = "PARTITA_PARENT"
"""Environment variable: the process ID that the child has to see as its parent."""
POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h: the signal that this process gets when the thread that made it ends."""


def end_with_parent(parent: int | None = None) -> None:
    """From now on, end this process when process `parent` has ended; None: the one named in the environment, if any.

    On Linux the kernel does it, also while native code holds the interpreter. It goes by the thread that started this
    process, so that thread has to wait for it. Elsewhere a thread looks twice a second.
    """
    if parent is None:
        parent = int(os.environ.pop(PARENT, "0"))
    if not parent or not hasattr(signal, "SIGKILL"):
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_look_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it had ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _look_after(parent: int) -> None:
    """End this process as soon as it has another parent."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
