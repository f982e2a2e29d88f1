"""Native code can end the process; the user still gets one line and an exit code.

The verb runs in a fork of this process, made before a session or a tokenizer is loaded, on the same stdin, stdout and
stderr. The parent waits, and says so when a signal ended the child. Not on Windows, which has no fork, and not for the
CPU provider alone, which has no foreign driver to crash.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from partita.commands.build import OWN_PROCESS
from partita.errors import INTERRUPTED, ResourceError
from partita.library.chain import Target
from partita.library.crashes import CRASHES, CrashError
from partita.orphans import end_with_parent
from partita.providers.base import Provider
from partita.signals import TerminatedError, held

PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that the child gets, too. Ctrl-C at a terminal reaches both, and then the child twice: see `signals`."""
END_SECONDS = 5.0
"""For the child to end, once it is told to; Python cannot end native code."""
LAST_WORD = b"."
last_word: int | None = None
"""In the child: the pipe by which it says that it has come to its end."""
in_child = False
"""This process is the child: it ends without unloading native libraries, some of which crash then, when all is said."""


def worth_it(target: Target) -> bool:
    """Whether a chain has native code beside ONNX Runtime's own, and this process may be forked."""
    foreign = any(provider.name != "cpu" for provider in target.chain)
    return foreign and OWN_PROCESS.get() and hasattr(os, "fork")


def supervised(verb: Callable[[], int], target: Target, *, goes_on: bool = False) -> int:
    """Run `verb` so that a crash of native code is an error: its exit code. `goes_on`: Ctrl-C does not end it.

    Raises CrashError when the child did not end by itself. Other exceptions of `verb` end in the child as they would
    have ended here. Temporary files of a child that crashed are removed here.
    """
    global in_child, last_word
    if not worth_it(target):
        return verb()
    sys.stdout.flush()
    sys.stderr.flush()
    heard, told = os.pipe()
    with held():
        folder = tempfile.mkdtemp(prefix="partita-")
        # What comes to the child before Python has it in order would be forgotten; blocked, it waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        parent, child = os.getpid(), os.fork()
        passing = Passing(child) if child else None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if passing is None:
        os.close(heard)
        end_with_parent(parent)
        in_child, last_word, tempfile.tempdir = True, told, folder
        return verb()
    os.close(told)
    try:
        status = passing.wait()
        words = os.read(heard, 2)
        ended_itself = words.endswith(LAST_WORD)
    finally:
        os.close(heard)
        shutil.rmtree(folder, ignore_errors=True)
        passing.stop()
    if passing.told is not None and not ended_itself:
        raise TerminatedError(passing.told)
    patience = END_SECONDS if goes_on else math.inf
    if os.WIFSIGNALED(status) and time.monotonic() - passing.interrupted_at < patience:
        return INTERRUPTED
    if os.WIFSIGNALED(status):
        return ended_by(os.WTERMSIG(status), target.chain)
    code = os.WEXITSTATUS(status)
    if not ended_itself:
        raise CrashError(target.chain, f"ended the run with exit code {code}")
    # The child has said everything and flushed; this process must add nothing, not even what it had buffered.
    os._exit(code)


def say_last_word() -> None:
    """In the child, when all is said and written: tell the parent that this end is no crash."""
    if last_word is not None:
        with suppress(OSError):
            os.write(last_word, LAST_WORD)


class Passing:
    """Signals of this process go to its child, from now on, until `stop`."""

    def __init__(self, child: int) -> None:
        self.child = child
        self.told: int | None = None
        """The signal by which it was told to end, and when, by the clock of `time.monotonic`."""
        self.told_at = 0.0
        self.interrupted_at = -math.inf
        """When it was told of Ctrl-C: whatever it ends with soon after that, the user wanted it to end. A conversation
        goes on.
        """
        self.woken, self.wakes = os.pipe()
        os.set_blocking(self.wakes, False)
        # A signal may come in any thread; what it writes wakes this one, in which Python runs handlers.
        self.waker = signal.set_wakeup_fd(self.wakes, warn_on_full_buffer=False)
        self.handlers = {number: signal.signal(number, self.tell) for number in PASSED_ON if not _ignored(number)}
        self.handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def tell(self, number: int, frame: object) -> None:
        """Pass on one signal."""
        if number == signal.SIGINT:
            self.interrupted_at = time.monotonic()
        if number != signal.SIGINT and self.told is None:
            self.told, self.told_at = number, time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.child, number)

    def wait(self) -> int:
        """Wait for the child; its wait status. One that was told to end and does not, in native code, is killed."""
        while True:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                return status
            left = None if self.told is None else self.told_at + END_SECONDS - time.monotonic()
            if left is not None and left <= 0:
                os.kill(self.child, signal.SIGKILL)
                return os.waitpid(self.child, 0)[1]
            if select.select([self.woken], [], [], left)[0]:
                os.read(self.woken, 4096)

    def stop(self) -> None:
        """Signals are this process's own again."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.waker)
        os.close(self.woken)
        os.close(self.wakes)


def _ignored(number: int) -> bool:
    """Whether this process was started with the signal ignored."""
    return signal.getsignal(number) == signal.SIG_IGN


def ended_by(number: int, chain: Sequence[Provider]) -> int:
    """The exit code after a signal. Raises CrashError when it means a crash."""
    if number == signal.SIGINT:
        return INTERRUPTED
    if number == signal.SIGKILL:
        raise ResourceError("the run was killed (SIGKILL), probably out of memory; free some")
    if number not in CRASHES:
        return 128 + number
    raise CrashError(chain, f"ended the run with {signal.Signals(number).name}")
