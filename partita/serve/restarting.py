"""A loaded package that is loaded again after its process was lost: native code of a provider may end that."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita.errors import GenerationError, PartitaError, ProviderError, ResourceError
from partita.library.edge import of_system
from partita.library.engine import CLOSED, Begun, Engine
from partita.library.speculation import NO_SPECULATION, Speculation

AGAIN_SECONDS = 5.0
"""At least between two attempts."""
_How = tuple[int | None, str | None, Speculation, str | None]
"""What a generation is opened with."""


class Restarting:
    """An `Engine` whose `open` loads the package again where it is lost; everything else is the loaded one's."""

    def __init__(self, load: Callable[[], Engine], told: Callable[[str], object], *, apart: bool = False) -> None:
        """Load the package. Raises what `load` raises. `told` hears of each time that it is loaded again. `apart`: it
        is in a process of its own, which `close` ends whatever is going on there.
        """
        self._load, self._told, self.apart = load, told, apart
        self.check: Callable[[Engine, Begun], object] | None = None
        """Looks at a package that was loaded again, with a generation that nobody else is in, and refuses it by raising
        a PartitaError.
        """
        self._engine = load()
        self._failed: PartitaError | None = None
        self._failed_at = 0.0
        self._opened = False
        """A generation has begun, with the prefix if there is one."""
        self._how: _How = None, None, NO_SPECULATION, None
        """Of the last generation that was asked for."""
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether it was there when it was needed last."""
        return self._failed is None

    def open(
        self,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
    ) -> Begun:
        """A generation whose rows are all free. Raises ProviderError where the package cannot be loaded again."""
        self._how = prefill_chunk, adapter, speculation, prefix
        failed = self._failed
        if failed is not None:
            if time.monotonic() - self._failed_at < AGAIN_SECONDS:
                # A new one each time: an exception keeps the frames of every time that it was raised.
                raise ProviderError(f"{failed.said}; it is tried again every {AGAIN_SECONDS:g} s", where=failed.where)
            return self._open_anew()
        try:
            return self._opens()
        except ProviderError as error:
            self._told(f"{error}; it is loaded again")
            return self._open_anew()

    def try_again(self) -> None:
        """Load the package again where that failed before, unless it was just now. Whoever has nothing else to do asks
        for it: a load balancer sends no request to a server that is down, and it would stay so.
        """
        if self._failed is not None and time.monotonic() - self._failed_at >= AGAIN_SECONDS:
            with suppress(PartitaError):  # it has been told
                self._open_anew()

    def close(self) -> None:
        """Free the package; one that is being loaded again meanwhile is freed then. May be called twice."""
        self._closed = True
        self._engine.close()

    def _opens(self) -> Begun:
        """A generation of the loaded package; without a prefix that was good once and is no more, as its file was taken
        away: prompts are read from their beginning then, and answers are the same.
        """
        prefill_chunk, adapter, speculation, prefix = self._how
        try:
            begun = self._engine.open(prefill_chunk, adapter, speculation, prefix)
        except GenerationError as error:
            if prefix is None or not self._opened:
                raise
            self._told(f"{error}; prompts are read from their beginning")
            return self._engine.open(prefill_chunk, adapter, speculation)
        self._opened = True
        return begun

    def _open_anew(self) -> Begun:
        """Raises PartitaError, whatever went wrong: the package that was there is closed by then, and is not `up`."""
        with suppress(OSError):  # what is left of its files is no reason to stay without it
            self._engine.close()
        try:
            self._engine = self._load()
            if self._closed:
                self._engine.close()
                raise GenerationError(CLOSED)
            begun = self._opens()
            if self.check is not None:
                self.check(self._engine, begun)
                begun = self._opens()
        except Exception as error:
            if self._closed:
                raise GenerationError(CLOSED) from error
            failed, known = _of_ours(error), self._failed
            self._failed, self._failed_at = failed, time.monotonic()
            if known is None or str(known) != str(failed):  # else it would be a line every few seconds
                self._told(f"not loaded: {failed}; it is tried again every {AGAIN_SECONDS:g} s")
            if failed is error:
                raise
            raise failed from error
        if self._failed is not None:
            self._told("it is loaded again, and takes requests")
        self._failed = None
        return begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _of_ours(error: Exception) -> PartitaError:
    """What ended a load, as an error of ours. A file is told as `where`, which is nothing for clients."""
    if isinstance(error, PartitaError):
        return error
    system = of_system(error)
    if isinstance(error, OSError) and isinstance(error.filename, str) and system is not None:
        return ResourceError(system.said.removeprefix(f"{error.filename}: "), where=Path(error.filename))
    return system or PartitaError(f"internal error: {type(error).__name__}: {error}; this is a bug in Partita")
