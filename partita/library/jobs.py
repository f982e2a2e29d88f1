"""One function in a worker process, or in this one. Its notes are passed on; a crash of native code is an error."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from partita.library.audience import QUIET, Audience
from partita.library.crashes import crash_error
from partita.providers.base import Provider
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError

NOTE, BEGIN, END, TOLD = "note", "begin", "end", "told"
"""Kinds of events: a note, the begin and the end of what takes long, and the argument of `told`."""


class Told(NamedTuple):
    """An event for the audience of the parent."""

    kind: str
    value: Any


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
    """What the function `work`, `module:name`, returns for these arguments, `audience`, and `told` where it is given.

    `chain`: the providers that it uses, named in the error of a crash. `in_worker`: it runs in a worker process, and
    this one does not import its module. `environment` and `timeout`, in seconds, are those of the worker. `patient`:
    the first Ctrl-C interrupts the function, whose result is waited for; the second ends the worker.
    Raises what the function raises, CrashError when native code ended the process, ResourceError when it was killed,
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
    """Passes what a worker tells its `pushing_audience` on to an audience here."""

    def __init__(self, audience: Audience, told: Callable[[Any], object] | None = None) -> None:
        self.audience, self.told = audience, told
        self.busy: AbstractContextManager[object] | None = None

    def __call__(self, event: Any) -> bool:
        """Pass an event on; False where it is of another kind."""
        if not isinstance(event, Told):
            return False
        kind, value = event
        if kind == NOTE:
            self.audience.note(value)
        elif kind == TOLD and self.told is not None:
            self.told(value)
        elif kind in (BEGIN, END):
            self.end()
            if kind == BEGIN:
                self.busy = self.audience.busy(value)
                self.busy.__enter__()
        return True

    def end(self) -> None:
        """Nothing takes long any more."""
        busy, self.busy = self.busy, None
        if busy is not None:
            busy.__exit__(None, None, None)


def pushing_audience(channel: Channel) -> Audience:
    """In a worker: an audience whose notes go to the parent."""

    @contextmanager
    def busy(title: str) -> Iterator[None]:
        channel.push(Told(BEGIN, title))
        try:
            yield
        finally:
            channel.push(Told(END, None))

    return Audience(lambda text: channel.push(Told(NOTE, text)), busy)


def run(channel: Channel) -> None:
    """The worker: call functions and push what they have to say."""
    audience = pushing_audience(channel)

    def call(work: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, told: bool) -> Any:
        given = {"told": lambda value: channel.push(Told(TOLD, value))} if told else {}
        return _function(work)(*args, audience=audience, **given, **kwargs)

    serve(channel, {"run": call})


def _function(work: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, _, name = work.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
