"""The parent side of a worker process: starts it, calls it, receives events, and reports how it ended.

Messages are pickled. The process is a new interpreter, not a fork: the program's `__main__` is not imported, and no
thread or lock is copied. Signal handlers and file descriptors of this process do not change.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import partita
from partita.errors import GenerationError, ProviderError
from partita.files import temporary_directory
from partita.runtime.ort.native_log import clean_lines
from partita.runtime.worker.child import INTERRUPT, POSIX

PROGRAM = "from partita.runtime.worker.child import main; main()"
END_SECONDS = 5.0
"""Time limit for the process to exit after `close` or the end of its stdout."""
LOG_BYTES = 4 << 20
"""Maximum bytes of its stderr that are read, from the end."""
LINE_LENGTH = 200
FORKED = "this process was forked after the worker process was started; start a new worker here"


class WorkerLostError(ProviderError):
    """A worker process ended, or was killed because of a timeout.

    `how`: `was killed by SIGSEGV`, `ended with exit code 1`, `gave no answer within 30 s`, `was closed`. `signal`:
    number of the signal that killed it, or None. `late`: it was killed because of a timeout. `closed`: it was closed by
    this process. `log`: lines of its stderr, at most the last `LOG_BYTES`.
    """

    def __init__(
        self,
        how: str,
        log: tuple[str, ...] = (),
        *,
        signal: int | None = None,
        late: bool = False,
        closed: bool = False,
    ) -> None:
        self.how, self.log, self.signal, self.late, self.closed = how, log, signal, late, closed
        super().__init__(f"the worker process {self.summary}")

    @property
    def summary(self) -> str:
        """How it ended and the last line of its stderr, as the end of a sentence."""
        return f"{self.how}; last line: {self.log[-1][:LINE_LENGTH]}" if self.log and not self.closed else self.how

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was probably exhausted: Linux sent SIGKILL."""
        return self.signal is not None and self.signal == getattr(signal, "SIGKILL", None)


class Worker:
    """A child process that runs `module`: its `HANDLERS`, or its `run(channel)`. See `child`.

    `environment`: its environment variables; None: those of this process. `python`: its interpreter; None: that of this
    process. `on_event` is called with each pushed event,
    `on_lost` with the error when it has ended, also after `close`. Both run in the thread that reads messages and must
    not wait for an answer of the worker. Thread-safe.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,
        python: Path | None = None,
        on_event: Callable[[Any], object] | None = None,
        on_lost: Callable[[WorkerLostError], object] | None = None,
    ) -> None:
        self._on_event, self._on_lost = on_event, on_lost
        self._parent = os.getpid()
        self._writing, self._ending = threading.Lock(), threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._number = 0
        self._end_reason: WorkerLostError | None = None
        """The reason why this side ended the process."""
        self.lost: WorkerLostError | None = None
        """How the process ended; None while it is running."""
        self._temporary = temporary_directory()
        self.folder = Path(self._temporary.name)
        """Its temporary folder, removed when it ends."""
        self._log = self.folder / "stderr"
        # This installation of Partita first.
        search_path = (str(Path(partita.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", ""))
        try:
            with self._log.open("wb") as log:
                # -P: a file in the current folder must not shadow a module.
                self.process = subprocess.Popen(
                    [python or sys.executable, "-P", "-c", PROGRAM, module, str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={
                        **(os.environ if environment is None else environment),
                        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
                        "TMPDIR": str(self.folder),
                    },
                    # Its own session: killed with its child processes, and not interrupted by a terminal's Ctrl-C.
                    start_new_session=POSIX,
                    creationflags=0 if POSIX else getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
        except BaseException:
            self._temporary.cleanup()
            raise
        self._thread = threading.Thread(target=self._read, name="partita-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The result of the handler of `verb`. Raises its exceptions, and WorkerLostError; see `wait`."""
        return self.wait(self.submit(verb, *args, **kwargs), timeout)

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call; return a future of its answer."""
        future: Future[Any] = Future()
        with self._writing:
            self._number += 1
            number = self._number
            self._calls[number] = future
        try:
            self._write((number, verb, args, kwargs))
        except BaseException:
            self._calls.pop(number, None)
            raise
        return future

    def wait(self, future: Future[Any], timeout: float | None = None, *, patient: bool = False) -> Any:
        """The answer of a call.

        Raises WorkerLostError when the process ends, or has no answer after `timeout` seconds and is killed.
        KeyboardInterrupt leaves it running, and `wait` may be called again. `patient`: the first Ctrl-C interrupts the
        handler and waits for its answer.
        """
        try:
            return future.result(timeout)
        except NotDone:
            if not future.done():  # otherwise it is the handler's own exception, or the answer has just arrived
                self.kill(f"gave no answer within {timeout:g} s")
        except KeyboardInterrupt:
            if future.done() or not patient:
                raise
            self.interrupt()
            return self.wait(future, timeout)
        return future.result(END_SECONDS)

    def send(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Send the process a message without an answer. Raises WorkerLostError when it has ended."""
        self._write((0, verb, args, kwargs))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the handlers of started calls; each then answers or raises."""
        with suppress(WorkerLostError):
            self.send(INTERRUPT, self._number)

    def log(self) -> tuple[str, ...]:
        """Lines of its stderr, without colours and time stamps."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_BYTES, 0))
                return clean_lines(file.read().decode("utf-8", errors="replace"))
        except OSError:  # the folder is gone
            return () if self.lost is None else self.lost.log

    def close(self) -> None:
        """End the process; it may finish its current work for `END_SECONDS`. May be called repeatedly by any thread."""
        if os.getpid() != self._parent:
            return
        if self._end_reason is None:
            self._end_reason = WorkerLostError("was closed", closed=True)
        assert self.process.stdin is not None
        if self._writing.acquire(timeout=END_SECONDS):  # not while another thread waits for a process that hangs
            try:
                with suppress(OSError, ValueError):  # it has ended or is already closed
                    self.process.stdin.write(pickle.dumps(None))
                    self.process.stdin.close()
            finally:
                self._writing.release()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.kill()

    def kill(self, how: str = "") -> None:
        """Kill the process and its child processes. `how`: for its error; default: `was closed`."""
        if os.getpid() != self._parent:
            return
        if self._end_reason is None:
            closed = WorkerLostError("was closed", closed=True)
            self._end_reason = WorkerLostError(how, self.log(), late=True) if how else closed
        self._end_process()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)  # until every call has failed
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError, ValueError):
            self.process.stdin.close()
        if not self._thread.is_alive():
            self.process.stdout.close()
        self._temporary.cleanup()

    def _write(self, message: tuple[int, str, tuple[Any, ...], dict[str, Any]]) -> None:
        if os.getpid() != self._parent:
            raise GenerationError(FORKED)
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        assert self.process.stdin is not None
        try:
            with self._writing:
                self.process.stdin.write(data)
                self.process.stdin.flush()
        except (OSError, ValueError):  # a broken pipe, or closed: the reading thread knows how it ended
            self._thread.join(2 * END_SECONDS)
        if self.lost is not None:
            raise self.lost

    def _read(self) -> None:
        """Deliver answers and events until the process ends, then fail its unanswered calls."""
        assert self.process.stdout is not None
        wrong = "closed its output"
        try:
            while True:
                number, failed, value = pickle.load(self.process.stdout)
                if not number:
                    if self._on_event is not None:
                        self._on_event(value)
                elif (future := self._calls.pop(number, None)) is not None:
                    future.set_exception(value) if failed else future.set_result(value)
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - otherwise it would be lost
            wrong = f"sent an invalid message ({type(error).__name__}: {error})"
        self.lost = lost = self._outcome(wrong)
        while self._calls:
            with suppress(KeyError):
                self._calls.popitem()[1].set_exception(lost)
        if self._on_lost is not None:
            self._on_lost(lost)

    def _outcome(self, wrong: str) -> WorkerLostError:
        """How the process ended. If it is still running, it is killed because of `wrong`."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end_reason = self._end_reason or WorkerLostError(wrong, self.log())
            code = 0
        self._end_process()
        return self._end_reason or WorkerLostError(ending_text(code), self.log(), signal=-code if code < 0 else None)

    def _end_process(self) -> None:
        """Kill the process and its session if it is still running."""
        with self._ending:
            if self.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    if POSIX:
                        os.killpg(self.process.pid, signal.SIGKILL)
                    else:
                        self.process.kill()
            self.process.wait()


def ending_text(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (probably out of memory)' if name == 'SIGKILL' else ''}"
