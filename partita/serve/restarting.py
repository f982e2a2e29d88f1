"""A loaded package that is loaded again after its process was lost: native code of a provider may end that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from partita.errors import GenerationError, PartitaError, ProviderError
from partita.library.engine import Begun, Engine
from partita.library.speculation import NO_SPECULATION, Speculation

AGAIN_SECONDS = 5.0
"""At least between two attempts."""


class Restarting:
    """An `Engine` whose `open` loads the package again where it is lost; everything else is the loaded one's."""

    def __init__(self, load: Callable[[], Engine], told: Callable[[str], object]) -> None:
        """Load the package. Raises what `load` raises. `told` hears of each time that it is loaded again."""
        self._load, self._told = load, told
        self.check: Callable[[Engine, Begun], object] | None = None
        """Looks at a package that was loaded again, with a generation that nobody else is in, and refuses it by raising
        a PartitaError.
        """
        self._engine = load()
        self._failed: PartitaError | None = None
        self._failed_at = 0.0
        self._opened = False
        """A generation has begun, with the prefix if there is one."""

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
        if self._failed is not None:
            if time.monotonic() - self._failed_at < AGAIN_SECONDS:
                # A new one each time: an exception keeps the frames of every time that it was raised.
                raise ProviderError(f"{self._failed}; it is tried again every {AGAIN_SECONDS:g} s")
            return self._open_anew(prefill_chunk, adapter, speculation, prefix)
        try:
            return self._opens(prefill_chunk, adapter, speculation, prefix)
        except ProviderError as error:
            self._told(f"{error}; it is loaded again")
            return self._open_anew(prefill_chunk, adapter, speculation, prefix)

    def _opens(
        self, prefill_chunk: int | None, adapter: str | None, speculation: Speculation, prefix: str | None
    ) -> Begun:
        """A generation of the loaded package; without a prefix that was good once and is no more, as its file was taken
        away: prompts are read from their beginning then, and answers are the same.
        """
        try:
            begun = self._engine.open(prefill_chunk, adapter, speculation, prefix)
        except GenerationError as error:
            if prefix is None or not self._opened:
                raise
            self._told(f"{error}; prompts are read from their beginning")
            return self._engine.open(prefill_chunk, adapter, speculation)
        self._opened = True
        return begun

    def _open_anew(
        self, prefill_chunk: int | None, adapter: str | None, speculation: Speculation, prefix: str | None
    ) -> Begun:
        self._engine.close()
        try:
            self._engine = self._load()
            begun = self._opens(prefill_chunk, adapter, speculation, prefix)
            if self.check is not None:
                self.check(self._engine, begun)
                begun = self._opens(prefill_chunk, adapter, speculation, prefix)
        except PartitaError as error:
            self._failed, self._failed_at = error, time.monotonic()
            self._told(f"not loaded: {error}")
            raise
        self._failed = None
        return begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
