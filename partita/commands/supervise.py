"""Native code can end the process; the user still gets one line and an exit code.

The verb runs in a fork of this process, made before a session or a tokenizer is loaded, on the same stdin, stdout and
stderr. The parent waits, and says so when a signal ended the child. Not on Windows, which has no fork, and not for the
CPU provider alone, which has no foreign driver to crash.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from partita.commands.chain_options import Target
from partita.errors import INTERRUPTED, ProviderError
from partita.providers.base import Provider

CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)


in_child = False
"""This process is the child: it ends without unloading native libraries, some of which crash then, when all is said."""


def worth_it(target: Target) -> bool:
    """Whether a chain has native code beside ONNX Runtime's own, and this process may be forked."""
    foreign = any(provider.name != "cpu" for provider in target.chain)
    return foreign and target.own_process and hasattr(os, "fork")


def supervised(verb: Callable[[], int], target: Target) -> int:
    """Run `verb` so that a crash of native code is an error: its exit code.

    Raises ProviderError when a signal that means a crash ended it. Other exceptions of `verb` end in the child as they
    would have ended here.
    """
    global in_child
    if not worth_it(target):
        return verb()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        in_child = True
        return verb()
    # Ctrl-C reaches the child too, which ends in its own way; what is sent to this process alone is passed on.
    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), pass_on(child))
    handlers[signal.SIGINT] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if os.WIFEXITED(status):
        # The child has said everything and flushed; this process must add nothing, not even what it had buffered.
        os._exit(os.WEXITSTATUS(status))
    return ended_by(os.WTERMSIG(status), target.chain)


def pass_on(child: int) -> Callable[[int, object], None]:
    """A signal handler that sends the signal to the child."""

    def handler(number: int, frame: object) -> None:
        os.kill(child, number)

    return handler


def ended_by(number: int, chain: Sequence[Provider]) -> int:
    """The exit code after a signal. Raises ProviderError when it means a crash."""
    if number == signal.SIGINT:
        return INTERRUPTED
    if number not in CRASHES:
        return 128 + number
    names = ", ".join(provider.name for provider in chain if provider.name != "cpu")
    raise ProviderError(
        f"{names}: initialisation_failed: native code ended the run with {signal.Signals(number).name}; see `partita "
        "providers` for which provider starts at all, or leave it out of --provider"
    )
