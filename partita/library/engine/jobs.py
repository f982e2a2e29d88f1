"""Run one function in a worker process, or in this one. A crash of native code is an error."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

from partita.errors import PartitaError, ProviderError, ResourceError
from partita.library.audience import QUIET, Audience
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.base import Provider
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError

T = TypeVar("T")
NOTE, BEGIN, END, TOLD = "note", "begin", "end", "told"
"""Kinds of events: a note, the begin and the end of a long operation, and the argument of `told`."""
CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)
"""Signals by which native code ends its process."""
Crashed = Mapping[str, str]
"""Providers that are left out, because native code ended the process while they were used -> how it ended. RUN and
EXPERIMENTS stand for no provider: the model is opened without them then.
"""
NONE_CRASHED: Crashed = {}


class Event(NamedTuple):
    """An event for the audience of the parent."""

    kind: str
    value: Any


class CrashError(ProviderError):
    """Native code ended the process. `how`: `ended the run: it was killed by SIGSEGV`."""

    def __init__(self, chain: Sequence[Provider], how: str) -> None:
        super().__init__(
            f"{', '.join(foreign(chain))}: initialisation_failed: native code {how}; see `partita providers` for which "
            "provider starts at all, or leave it out of `providers`"
        )
        self.how = how


def run_job(
    work: str,
    *args: Any,
    chain: Sequence[Provider],
    in_worker: bool = True,
    audience: Audience = QUIET,
    told: Callable[[Any], object] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    patient: bool = False,
    **kwargs: Any,
) -> Any:
    """Call the function `work`, `module:name`, with these arguments, `audience`, and `told` where it is given.

    `chain`: the providers that it uses, named in the error of a crash. `in_worker`: it runs in a worker process, and
    this one does not import its module. `environment` and `timeout`, in seconds, are those of the worker. `patient`:
    the first Ctrl-C interrupts the function, whose result is waited for; the second ends the worker.
    Raises the function's exceptions, CrashError when native code ended the process, ResourceError when it was killed,
    WorkerLostError when it took too long.
    """
    if not in_worker:
        given = {} if told is None else {"told": told}
        return _function(work)(*args, audience=audience, **given, **kwargs)
    events = AudienceEvents(audience, told)
    with Worker(__name__, environment=environment, on_event=events) as worker:
        future = worker.submit("run", work, args, kwargs, told=told is not None)
        try:
            try:
                return worker.wait(future, timeout)
            except KeyboardInterrupt:
                if not patient:
                    raise
                worker.interrupt()
                return worker.wait(future, timeout)
        except WorkerLostError as lost:
            raise crash_error(lost, chain) from lost
        finally:
            events.end()


class AudienceEvents:
    """Passes the events of a worker's `pushing_audience` on to an audience here."""

    def __init__(self, audience: Audience, told: Callable[[Any], object] | None = None) -> None:
        self._audience, self._told = audience, told
        self._busy: AbstractContextManager[object] | None = None

    def __call__(self, event: Any) -> bool:
        """Pass an event on; False where it is of another kind."""
        if not isinstance(event, Event):
            return False
        kind, value = event
        if kind == NOTE:
            self._audience.note(value)
        elif kind == TOLD and self._told is not None:
            self._told(value)
        elif kind in (BEGIN, END):
            self.end()
            if kind == BEGIN:
                self._busy = self._audience.busy(value)
                self._busy.__enter__()
        return True

    def end(self) -> None:
        """End the long operation."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.__exit__(None, None, None)


def pushing_audience(channel: Channel) -> Audience:
    """In a worker: an audience whose notes go to the parent."""

    @contextmanager
    def busy(title: str) -> Iterator[None]:
        channel.push(Event(BEGIN, title))
        try:
            yield
        finally:
            channel.push(Event(END, None))

    return Audience(lambda text: channel.push(Event(NOTE, text)), busy)


def run(channel: Channel) -> None:
    """The worker: call functions, and push their notes."""
    audience = pushing_audience(channel)

    def call(work: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, told: bool) -> Any:
        given = {"told": lambda value: channel.push(Event(TOLD, value))} if told else {}
        return _function(work)(*args, audience=audience, **given, **kwargs)

    serve(channel, {"run": call})


def _function(work: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, _, name = work.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def crash_error(lost: WorkerLostError, chain: Sequence[Provider]) -> PartitaError:
    """The error for a worker process that ended while it used these providers; the error itself where none crashed."""
    if lost.out_of_memory:
        return ResourceError("the run was killed (SIGKILL), probably out of memory; free some")
    if lost.late or lost.closed or not foreign(chain):
        return lost
    return CrashError(chain, f"ended the run: it {lost.what}")


def foreign(chain: Sequence[Provider]) -> list[str]:
    """Names of the providers of a chain but the CPU's, whose only native code is ONNX Runtime's own."""
    return [provider.name for provider in chain if provider.name != "cpu"]


def despite_crashes(chain: Sequence[Provider], place: Callable[[Crashed], T], *, package: bool = False) -> T:
    """The result of `place` with all providers; after a crash, without a run, then without experiments either, and then
    without a provider.

    Of several providers each is left out by itself first, and then all of them. A `package` is not opened without a
    run: its inputs are not made up. Raises CrashError when native code ends the process each time, and the exceptions
    of `place`.
    """
    try:
        return place({})
    except CrashError as crash:
        names, last = foreign(chain), crash
    opened = [] if package else [[RUN], [RUN, EXPERIMENTS]]
    for left_out in (*opened, *([name] for name in names), *([names] if len(names) > 1 else [])):
        try:
            return place(dict.fromkeys(left_out, f"native code {last.how}"))
        except CrashError as crash:
            last = crash
    raise last
