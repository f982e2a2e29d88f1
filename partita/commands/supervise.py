"""Native code can end the process; the user still gets one line and an exit code.

The verb runs in a fork of this process, made before a session or a tokenizer is loaded, on the same stdin, stdout and
stderr. The parent waits, and says so when a signal ended the child. Not on Windows, which has no fork, and not for the
CPU provider alone, which has no foreign driver to crash.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

from partita.commands.chain_options import Target
from partita.errors import INTERRUPTED, ProviderError, ResourceError
from partita.providers.base import Provider

CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)


WAITS_FOR_SIGNALS = hasattr(signal, "sigwaitinfo")
"""Not on macOS: there the held signals are delivered once the child has ended, and only what it got itself ends it."""
WATCHED = frozenset(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD") if hasattr(signal, name)
)
SENT_BY_KERNEL = 128
"""si_code of a signal that no process sent, on Linux: a key at the terminal."""
LAST_WORD = b"."
last_word: int | None = None
"""In the child: the pipe by which it says that it has come to its end."""
in_child = False
"""This process is the child: it ends without unloading native libraries, some of which crash then, when all is said."""


def worth_it(target: Target) -> bool:
    """Whether a chain has native code beside ONNX Runtime's own, and this process may be forked."""
    foreign = any(provider.name != "cpu" for provider in target.chain)
    return foreign and target.own_process and hasattr(os, "fork")


def supervised(verb: Callable[[], int], target: Target) -> int:
    """Run `verb` so that a crash of native code is an error: its exit code.

    Raises ProviderError when the child did not end by itself. Other exceptions of `verb` end in the child as they would
    have ended here. Temporary files of a child that crashed are removed here.
    """
    global in_child, last_word
    if not worth_it(target):
        return verb()
    sys.stdout.flush()
    sys.stderr.flush()
    folder = tempfile.mkdtemp(prefix="partita-")
    heard, told = os.pipe()
    # Held from before the fork, so that no signal finds the parent without its child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    child = os.fork()
    if child == 0:
        os.close(heard)
        in_child, last_word, tempfile.tempdir = True, told, folder
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return verb()
    os.close(told)
    try:
        status = wait_for(child)
        ended_itself = os.read(heard, 1) == LAST_WORD
    finally:
        os.close(heard)
        shutil.rmtree(folder, ignore_errors=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.WIFSIGNALED(status):
        return ended_by(os.WTERMSIG(status), target.chain)
    code = os.WEXITSTATUS(status)
    if not ended_itself:
        raise ProviderError(
            f"{foreign_names(target.chain)}: initialisation_failed: native code ended the run with exit code {code}"
        )
    # The child has said everything and flushed; this process must add nothing, not even what it had buffered.
    os._exit(code)


def say_last_word() -> None:
    """In the child, when all is said and written: tell the parent that this end is no crash."""
    if last_word is not None:
        with suppress(OSError):
            os.write(last_word, LAST_WORD)


def wait_for(child: int) -> int:
    """Wait for the child and pass on the signals that this process gets alone; its wait status.

    Ctrl-C is not passed on: the terminal sends it to the child as well.
    """
    while True:
        pid, status = os.waitpid(child, os.WNOHANG if WAITS_FOR_SIGNALS else 0)
        if pid:
            return status
        info = signal.sigwaitinfo(WATCHED)
        from_terminal = info.si_signo == signal.SIGINT and info.si_code == SENT_BY_KERNEL
        if info.si_signo != signal.SIGCHLD and not from_terminal:
            with suppress(ProcessLookupError):
                os.kill(child, info.si_signo)


def foreign_names(chain: Sequence[Provider]) -> str:
    """The providers of the chain but the CPU's."""
    return ", ".join(provider.name for provider in chain if provider.name != "cpu")


def ended_by(number: int, chain: Sequence[Provider]) -> int:
    """The exit code after a signal. Raises ProviderError when it means a crash."""
    if number == signal.SIGINT:
        return INTERRUPTED
    if number == signal.SIGKILL:
        raise ResourceError("the run was killed with SIGKILL, as the system does when memory runs out; free some")
    if number not in CRASHES:
        return 128 + number
    name = signal.Signals(number).name
    raise ProviderError(
        f"{foreign_names(chain)}: initialisation_failed: native code ended the run with {name}; see `partita "
        "providers` for which provider starts at all, or leave it out of --provider"
    )
