"""A model over which native code ended the process is placed once more: only opened, and then without a provider.

Opening it tells where its nodes are: a run on made-up values may crash where one on the user's would not, and so may
libraries that have no part in it. Where that ends the process as well, a provider is left out. So there is a report all
the same, and experiments find the part over which the provider crashes, each in a process of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from partita.errors import PartitaError, ProviderError, ResourceError
from partita.observations.names import EXPERIMENTS, RUN
from partita.providers.base import Provider
from partita.runtime.worker.parent import WorkerLostError

T = TypeVar("T")
CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)
"""Signals by which native code ends its process."""
Crashed = Mapping[str, str]
"""Providers by name that are left out, because native code ended the process while they were used, and how it ended.
RUN and EXPERIMENTS stand for no provider: the model is opened without them then."""


NONE_CRASHED: Crashed = {}


class CrashError(ProviderError):
    """Native code ended the process. `how`: `ended the run: it was killed by SIGSEGV`."""

    def __init__(self, chain: Sequence[Provider], how: str) -> None:
        super().__init__(
            f"{', '.join(foreign(chain))}: initialisation_failed: native code {how}; see `partita providers` for which "
            f"provider starts at all, or leave it out of `providers`"
        )
        self.how = how


def crash_error(lost: WorkerLostError, chain: Sequence[Provider]) -> PartitaError:
    """The error for a worker process that ended while it used these providers; the error itself where none crashed."""
    if lost.out_of_memory:
        return ResourceError("the run was killed (SIGKILL), probably out of memory; free some")
    if lost.late or lost.closed or not foreign(chain):
        return lost
    return CrashError(chain, f"ended the run: it {lost.what}")


def foreign(chain: Sequence[Provider]) -> list[str]:
    """Names of the providers of a chain but the CPU's, which has no native code beside ONNX Runtime's own."""
    return [provider.name for provider in chain if provider.name != "cpu"]


def despite_crashes(chain: Sequence[Provider], place: Callable[[Crashed], T], *, package: bool = False) -> T:
    """What `place` gives with all providers; after a crash, without a run, then without experiments either, and then
    with the one provider left out without which there is none.

    Of several providers each is left out by itself first, and then all of them. A `package` is not opened alone: what
    it is run on is as good as a user's. Raises CrashError when native code ends the process without them, too, and
    whatever `place` raises.
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
