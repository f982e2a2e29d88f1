"""The child side of a worker process: runs a module that answers messages, and exits with its parent.

A module has either `HANDLERS`, functions by verb that answer one message after the other, or `run(channel)` with its
own loop. Only this module changes signals and file descriptors: stdout is for messages, so all prints go to stderr.
"""

from __future__ import annotations

import _thread
import importlib
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from partita import process
from partita.errors import PartitaError

POSIX = os.name == "posix"
INTERRUPT = "interrupt"
"""Verb of a message that interrupts the calls up to this number."""
Handlers = Mapping[str, Callable[..., Any]]


class Message(NamedTuple):
    """A message from the parent. `number` is 0 if it expects no reply."""

    number: int
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Channel:
    """Messages from and to the parent. Thread-safe."""

    def __init__(self, source: BinaryIO, sink: BinaryIO, folder: Path) -> None:
        self._source, self._sink, self._folder = source, sink, folder
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writing, self._ending = threading.Lock(), threading.Lock()
        self.closed = False
        """No more messages: the parent has closed the worker."""
        self._interruptible, self._interrupted = False, 0
        """Whether a handler is running, and the last message that `Worker.interrupt` applies to."""
        threading.Thread(target=self._read, name="partita-messages", daemon=True).start()

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None after `timeout` seconds, or when there are no more (`closed`)."""
        if self.closed or (timeout == 0 and self._messages.empty()):
            return None
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        self.closed = message is None
        return message

    def push(self, event: Any) -> None:
        """Send an event to the parent's `on_event`."""
        self.send(0, event)

    def send(self, number: int, value: Any, *, failed: bool = False) -> None:
        """Answer a message; `failed`: `value` is raised in the parent. Raises pickle's exceptions."""
        data = pickle.dumps((number, failed, value), pickle.HIGHEST_PROTOCOL)
        try:
            with self._writing:
                self._sink.write(data)
                self._sink.flush()
        except OSError:  # the parent has exited, which may be visible here before stdin ends
            self._end()

    def run(self, message: Message, handlers: Handlers) -> Any:
        """Call the handler of a message. Raises its exceptions, and KeyboardInterrupt after an interruption."""
        self._interruptible = True
        try:
            if 0 < message.number <= self._interrupted:
                self.on_interrupt()
            return handlers[message.verb](*message.args, **message.kwargs)
        finally:
            self._interruptible = False

    def on_interrupt(self, *_: object) -> None:
        """Handler of SIGINT: interrupts a message's handler, but never the writing of an answer."""
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def _read(self) -> None:
        """Queue messages until the parent sends None. If stdin ends without it, the parent has exited."""
        try:
            while (frame := pickle.load(self._source)) is not None:
                if frame[1] == INTERRUPT:
                    self._interrupted = frame[2][0]
                    os.kill(os.getpid(), signal.SIGINT) if POSIX else _thread.interrupt_main()
                else:
                    self._messages.put(Message(*frame))
            self._messages.put(None)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._end()

    def _end(self) -> NoReturn:
        """Exit immediately and remove the folder, because the parent has exited."""
        with self._ending:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)


def serve(channel: Channel, handlers: Handlers) -> None:
    """Answer messages, one after the other, until the parent closes the worker."""
    while not channel.closed:
        message = channel.receive()
        if message is not None:
            handle_message(channel, message, handlers)


def handle_message(channel: Channel, message: Message, handlers: Handlers) -> None:
    """Call the handler of a message and send its result.

    Its exception, including KeyboardInterrupt (`Worker.interrupt`), is raised in the parent.
    """
    try:
        value = channel.run(message, handlers)
        if message.number:
            channel.send(message.number, value)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised in the parent
        if message.number:
            channel.send(message.number, _portable(error), failed=True)
        else:
            traceback.print_exc()


def _portable(error: BaseException) -> BaseException:
    """The exception, or a PartitaError with its text if it cannot be unpickled."""
    if isinstance(error, PartitaError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - exceptions of other libraries may have any constructor
        return PartitaError(f"internal error: {type(error).__name__}: {error}")
    return error


def main() -> None:
    """Run the module of this process and exit without unloading native libraries, some of which crash then."""
    module_name, folder = sys.argv[1:3]
    process.own_process = True
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the channel handles it
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    code = 1
    try:
        channel = Channel(source, sink, Path(folder))
        signal.signal(signal.SIGINT, channel.on_interrupt)
        module = importlib.import_module(module_name)
        if hasattr(module, "run"):
            module.run(channel)
        else:
            serve(channel, module.HANDLERS)
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reads the end of stderr
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
