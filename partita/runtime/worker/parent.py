"""The parent's side of a worker process: start it, call it, receive its events, and say how it ended.

Messages are pickled. The process is a new interpreter, not a fork: the program's `__main__` is not imported again, and
no thread or lock of this process is copied. Nothing here changes signal handlers or file descriptors of this process.
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

END_SECONDS = 5.0
"""For the process to end by itself, once it is closed or its stdout has ended."""
LOG_BYTES = 4 << 20
"""What is read of its stderr at most, from the end."""
LINE_LENGTH = 200
FORKED = "this process was forked after the worker process was started; start one here"


class WorkerLostError(ProviderError):
    """A worker process ended, or was ended because it did not answer in time.

    `how`: `was killed by SIGSEGV`, `ended with exit code 1`, `gave no answer within 30 s`, `was closed`. `signal`: the
    number of the signal that killed it, or None. `late`: it was killed here because it did not answer in time.
    `closed`: it was closed here. `log`: lines of its stderr, the last `LOG_BYTES` at most.
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
        super().__init__(f"the worker process {self.what}")

    @property
    def what(self) -> str:
        """How it ended and the last line of its stderr, as the end of a sentence."""
        return f"{self.how}; last line: {self.log[-1][:LINE_LENGTH]}" if self.log and not self.closed else self.how

    @property
    def out_of_memory(self) -> bool:
        """Probably: another process sent SIGKILL, as Linux does when memory is exhausted."""
        return self.signal is not None and self.signal == getattr(signal, "SIGKILL", None)


class Worker:
    """A child process that runs `module`: its `HANDLERS`, or its `run(channel)`. See `child`.

    `environment`: its environment variables; None: those of this process. `on_event` gets each event that it pushes,
    `on_lost` the error when it has ended, `close` included; both are called by the thread that reads its messages, and
    must not wait for an answer of the worker. Methods may be called from several threads.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[Any], object] | None = None,
        on_lost: Callable[[WorkerLostError], object] | None = None,
    ) -> None:
        self._on_event, self._on_lost = on_event, on_lost
        self._parent = os.getpid()
        self._writing, self._ending = threading.Lock(), threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._number = 0
        self._why: WorkerLostError | None = None
        """Why this side ended the process."""
        self.lost: WorkerLostError | None = None
        """How the process ended; None while it runs."""
        self._temporary = temporary_directory()
        self.folder = Path(self._temporary.name)
        """Its folder of temporary files, removed with it."""
        self._log = self.folder / "stderr"
        try:
            with self._log.open("wb") as log:
                # -P: a file in the current folder must not shadow a module.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __package__, module, str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={
                        **(os.environ if environment is None else environment),
                        "PYTHONPATH": _search_path(),
                        "TMPDIR": str(self.folder),
                    },
                    # It is killed with the processes it started, and a terminal's Ctrl-C does not reach it.
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
        """What the handler of `verb` returns. Raises what it raises, and WorkerLostError; see `wait`."""
        return self.wait(self.submit(verb, *args, **kwargs), timeout)

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call; its answer is in the future."""
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

    def wait(self, future: Future[Any], timeout: float | None = None) -> Any:
        """The answer of a call. Raises WorkerLostError when the process ends before, or is still busy after `timeout`
        seconds, and is killed for that. KeyboardInterrupt leaves it running: the call may be waited for once more.
        """
        try:
            return future.result(timeout)
        except NotDone:
            if not future.done():  # else it is the handler's own exception, or the answer came just now
                self._give_up(WorkerLostError(f"gave no answer within {timeout:g} s", self.log(), late=True))
        return future.result(END_SECONDS)

    def send(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Give the process a message that it does not answer. Raises WorkerLostError when it has ended."""
        self._write((0, verb, args, kwargs))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the handlers of the calls that were started; each then answers or raises."""
        with suppress(WorkerLostError):
            self.send(INTERRUPT, self._number)

    def log(self) -> tuple[str, ...]:
        """Lines of its stderr, without colours and time stamps."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_BYTES, 0))
                return clean_lines(file.read().decode("utf-8", errors="replace"))
        except OSError:  # the folder is gone
            return ()

    def close(self) -> None:
        """End the process: it may finish what it does for `END_SECONDS`. May be called twice, and from any thread."""
        if os.getpid() != self._parent:
            return
        if self._why is None:
            self._why = WorkerLostError("was closed", closed=True)
        assert self.process.stdin is not None
        if self._writing.acquire(timeout=END_SECONDS):  # not while another thread waits for a process that hangs
            try:
                with suppress(OSError, ValueError):  # it has ended, or is closed already
                    self.process.stdin.write(pickle.dumps(None))
                    self.process.stdin.close()
            finally:
                self._writing.release()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.kill()

    def kill(self, how: str = "") -> None:
        """End the process and everything that it started, at once. Without `how`, its error says that it was closed."""
        if os.getpid() != self._parent:
            return
        self._give_up(
            WorkerLostError(how, self.log(), late=True) if how else WorkerLostError("was closed", closed=True)
        )
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
        except (OSError, ValueError):  # a broken pipe, or closed: the thread that reads knows how it ended
            self._thread.join(2 * END_SECONDS)
        if self.lost is not None:
            raise self.lost

    def _read(self) -> None:
        """Deliver answers and events until the process ends, then fail the calls that it left."""
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
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it
            wrong = f"sent a message that cannot be handled ({type(error).__name__}: {error})"
        self.lost = lost = self._outcome(wrong)
        while self._calls:
            with suppress(KeyError):
                self._calls.popitem()[1].set_exception(lost)
        if self._on_lost is not None:
            self._on_lost(lost)

    def _outcome(self, wrong: str) -> WorkerLostError:
        """How the process ended. One that still runs is killed; `wrong` says why."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._why = self._why or WorkerLostError(wrong, self.log())
            code = 0
        self._end_process()
        return self._why or WorkerLostError(how_ended(code), self.log(), signal=-code if code < 0 else None)

    def _give_up(self, why: WorkerLostError) -> None:
        """End the process for this reason, and wait until every call has been told."""
        if self._why is None:
            self._why = why
        self._end_process()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError, ValueError):
            self.process.stdin.close()
        if not self._thread.is_alive():
            self.process.stdout.close()

    def _end_process(self) -> None:
        """Kill the process with its session, if it still runs."""
        with self._ending:
            if self.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    if POSIX:
                        os.killpg(self.process.pid, signal.SIGKILL)
                    else:
                        self.process.kill()
            self.process.wait()


def how_ended(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (probably out of memory)' if name == 'SIGKILL' else ''}"


def _search_path() -> str:
    """PYTHONPATH of the process: this very Partita first, installed or not."""
    ours = str(Path(partita.__file__).resolve().parent.parent)
    return os.pathsep.join(part for part in (ours, os.environ.get("PYTHONPATH", "")) if part)
