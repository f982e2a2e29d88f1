"""A module of a worker process for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from partita.errors import ProviderError, ProviderRefusal, RefusedNode
from partita.runtime.worker.child import Channel, handle_message


class OddError(Exception):
    """An exception that pickle cannot restore."""

    def __init__(self, first, second):
        super().__init__(first)


def raise_(kind):
    if kind == "ours":
        refusing = ProviderRefusal("C", "r", "k", "e", "m")
        raise ProviderError("wrong", nodes=(RefusedNode("n", "Add", None, "B", (refusing,)),))
    if kind == "odd":
        raise OddError("a", "b")
    raise {"system": FileNotFoundError(2, "no such file", "x"), "time": TimeoutError("t")}[kind]


def end(how):
    os.write(2, b"\x1b[31mlast words\x1b[0m\n")
    if isinstance(how, int):
        os._exit(how)
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(60)


def start_other():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def print_everywhere():
    sys.stdout.write("printed\n")
    os.write(1, b"native\n")
    os.system("echo of a child")
    return sys.stdin.read()


def sleep(seconds: float) -> None:
    """Sleep in short pieces: a signal just before a single system call would not end it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)


HANDLERS: dict[str, Any] = {
    "add": lambda *numbers, start=0: sum(numbers, start),
    "environment": lambda name: (
        os.environ.get(name),
        tempfile.gettempdir(),
        hasattr(sys.modules["__main__"], "__file__"),
    ),
    "raise": raise_,
    "end": end,
    "sleep": sleep,
    "start": start_other,
    "print": print_everywhere,
    "unpicklable": lambda: lambda: 0,
}


def run(channel: Channel) -> None:
    """Answer messages; push what is sent."""
    while not channel.closed:
        message = channel.receive(timeout=0.01)
        if message is not None and message.verb == "push":
            for event in message.args:
                channel.push(event)
        elif message is not None:
            handle_message(channel, message, HANDLERS)
