"""A child process that is asked one thing after the other while nothing goes wrong in it, and then started again.

Starting one loads ONNX Runtime and the provider, or transformers, which takes longer than most of what it is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.files import temporary_directory
from partita.orphans import PARENT
from partita.runtime.ort.native_log import clean_lines
from partita.runtime.process.children import ChildOutcome, how_ended, read_end
from partita.runtime.process.live_child import ChildLostError, LiveChild
from partita.signals import ended_by_exception, held


class ProbeProcess:
    """At most one child process, started when there is something to ask. `environment`: its variables."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module, self.environment = module, environment
        self._child: LiveChild | None = None
        self._folder: TemporaryDirectory[str] | None = None

    @property
    def running(self) -> bool:
        """Whether a child has answered before and waits for more."""
        return self._child is not None

    def ask(self, request: Mapping[str, Any], timeout_seconds: float) -> ChildOutcome:
        """Give the child a request, and wait until it is done with it; a child that is not is gone then.

        Interrupted, the child is ended.
        """
        began = time.perf_counter()
        done = False
        with ended_by_exception():
            try:
                child = self._child or self.start()
                answer = child.ask(request, timeout_seconds)
                done = True
                return ChildOutcome(answer, "", (), None, time.perf_counter() - began)
            except ChildLostError:
                code = child.process.returncode
                ended = f"gave no answer within {timeout_seconds:g} s" if child.late else how_ended(code)
                killed_by = -code if code < 0 and not child.late else None
                log = clean_lines(read_end(child.log))
                return ChildOutcome(None, "", log, ended, time.perf_counter() - began, child.late, killed_by)
            finally:
                if not done:
                    self.end()

    def end(self) -> None:
        """End the child, if there is one. It is told nothing: it leaves nothing behind but its folder."""
        if self._child is not None:
            self._child.kill()
        if self._folder is not None:
            self._folder.cleanup()
        self._child = self._folder = None

    def start(self) -> LiveChild:
        """A new child. What a crash leaves behind goes with its folder."""
        with held():
            self._folder = temporary_directory()
            environment = {**self.environment, PARENT: str(os.getpid())}
            self._child = LiveChild(self.module, Path(self._folder.name) / "child", environment=environment)
        return self._child
