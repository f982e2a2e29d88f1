"""Runs one function in a worker process or in this process. A crash of native code becomes an error."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from partita.errors import PartitaError, ProviderError, ResourceError
from partita.library.api import QUIET, Audience
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.base import Provider
from partita.runtime.worker.child import Channel, serve
from partita.runtime.worker.parent import Worker, WorkerLostError

T = TypeVar("T")
Event = tuple[str, str | None]
"""For the parent's audience: NOTE and its text; BUSY and the title of a long operation, None at its end."""
NOTE, BUSY = "note", "busy"
CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)
"""Signals with which native code ends its process."""
Crashed = Mapping[str, str]
"""Skipped providers whose native code crashed -> how the process ended. RUN and EXPERIMENTS are placeholders: skip the
run or the experiments."""
NONE_CRASHED: Crashed = {}


class CrashError(ProviderError):
    """Native code crashed. `how`: e.g. `ended the run: it was killed by SIGSEGV`."""

    def __init__(self, chain: Sequence[Provider], how: str) -> None:
        super().__init__(
            f"{', '.join(foreign(chain))}: initialisation_failed: native code {how}; run `partita providers` to see "
            "which provider starts, or remove it from `providers`"
        )
        self.how = how


def run_job(
    work: str,
    *args: Any,
    chain: Sequence[Provider],
    in_worker: bool = True,
    audience: Audience = QUIET,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    patient: bool = False,
    **kwargs: Any,
) -> Any:
    """Call the function `work` (`module:name`) with these arguments and `audience`.

    `chain`: the providers that it uses, named in the error of a crash. `in_worker`: run it in a worker process; this
    process does not import its module then. `environment` and `timeout` (seconds): of the worker. `patient`: the first
    Ctrl-C interrupts the function and waits for its result; the second ends the worker. Raises the function's
    exceptions, CrashError when native code crashed, ResourceError when it was killed, WorkerLostError after a timeout.
    """
    if not in_worker:
        return _function(work)(*args, audience=audience, **kwargs)
    events = AudienceEvents(audience)
    with Worker(__name__, environment=environment, on_event=events) as worker:
        try:
            return worker.wait(worker.submit("run", work, args, kwargs), timeout, patient=patient)
        except WorkerLostError as lost:
            raise crash_error(lost, chain) from lost
        finally:
            events.end()


class AudienceEvents:
    """Passes the events of a worker's `pushing_audience` to an audience in this process."""

    def __init__(self, audience: Audience) -> None:
        self._audience, self._busy = audience, ExitStack()

    def __call__(self, event: Event) -> None:
        """Pass on an event."""
        kind, text = event
        if kind == NOTE:
            self._audience.note(text or "")
            return
        self.end()
        if text is not None:
            self._busy.enter_context(self._audience.busy(text))

    def end(self) -> None:
        """End the long operation."""
        self._busy.close()


def pushing_audience(channel: Channel) -> Audience:
    """In a worker: an audience that sends notes to the parent."""

    @contextmanager
    def busy(title: str) -> Iterator[None]:
        channel.push((BUSY, title))
        try:
            yield
        finally:
            channel.push((BUSY, None))

    return Audience(lambda text: channel.push((NOTE, text)), busy)


def run(channel: Channel) -> None:
    """The worker: call functions and send their notes."""
    audience = pushing_audience(channel)

    def call(work: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _function(work)(*args, audience=audience, **kwargs)

    serve(channel, {"run": call})


def _function(work: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, _, name = work.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def crash_error(lost: WorkerLostError, chain: Sequence[Provider]) -> PartitaError:
    """The error for a worker process that ended while it used these providers; `lost` itself if none crashed."""
    if lost.out_of_memory:
        return ResourceError("the run was killed (SIGKILL), probably out of memory; free some")
    if lost.late or lost.closed or not foreign(chain):
        return lost
    return CrashError(chain, f"ended the run: it {lost.summary}")


def foreign(chain: Sequence[Provider]) -> list[str]:
    """Names of the providers in a chain other than CPU, which has no native code besides ONNX Runtime."""
    return [provider.name for provider in chain if provider.name != "cpu"]


def despite_crashes(chain: Sequence[Provider], place: Callable[[Crashed], T], *, package: bool = False) -> T:
    """The result of `place` with all providers; after a crash without a run, then without experiments, then without a
    provider.

    Each of several providers is left out alone first, then all of them. A `package` is not opened without a run,
    because its inputs are known. Raises CrashError if every attempt crashes, and the exceptions of `place`.
    """
    try:
        return place({})
    except CrashError as crash:
        names, last = foreign(chain), crash
    opened = [] if package else [[RUN], [RUN, EXPERIMENTS]]
    for omitted in (*opened, *([name] for name in names), *([names] if len(names) > 1 else [])):
        try:
            return place(dict.fromkeys(omitted, f"native code {last.how}"))
        except CrashError as crash:
            last = crash
    raise last
