"""A package loaded in a child process, because a provider's native code may end the process that it is in.

The child is asked one thing at a time, in JSON, with a number that its answer repeats: what it still has to say after a
Ctrl-C here is not taken for the answer to the next question.
"""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from partita.errors import ProviderError
from partita.files import temporary_directory
from partita.library.chain import ChainOptions
from partita.library.crossing import FAREWELL, raise_told
from partita.library.engine import Begun, GenerateRequest, Opened, ReportRequest
from partita.package import Verification
from partita.partition_reports.records import Report
from partita.runtime.engine.recorder import Step
from partita.runtime.process.live_child import ChildLostError, LiveChild

CHILD = "partita.library.host"
PATIENCE_SECONDS = 30.0 * 24 * 3600
"""A step of a large model on a slow device may take long, and whoever waits for it can press Ctrl-C."""
REQUESTS = TypeAdapter(GenerateRequest)
REPORTS = TypeAdapter(ReportRequest)
OPENED = TypeAdapter(Opened)
BEGUN = TypeAdapter(Begun)
STEPS = TypeAdapter(Step)


class RemoteEngine:
    """A loaded package in a process of its own. See `engine.Engine`."""

    def __init__(self, folder: Path, where: ChainOptions, *, observe: bool) -> None:
        """Start the child and open the package there. Raises what `LocalEngine` does, and ProviderError for a crash."""
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._names = where.provider
        self._folder = temporary_directory()
        try:
            folder_of_child = Path(self._folder.name) / "child"
            self._child = LiveChild(CHILD, folder_of_child, (self._folder.name,), FAREWELL)
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            given = {"package": str(folder), "where": asdict(where), "observe": observe}
            self.opened = OPENED.validate_python(self._ask("load", given))
        except BaseException:
            self.close()
            raise

    def begin(self, request: GenerateRequest) -> Begun:
        """Begin a generation there."""
        return BEGUN.validate_python(self._ask("begin", REQUESTS.dump_python(request, mode="json")))

    def step(self, number: int) -> Step | None:
        """The next step; None when there is none."""
        answer = self._ask("step", {"number": number})
        return None if answer is None else STEPS.validate_python(answer)

    def report(self, request: ReportRequest) -> Report:
        """The report of the last generation."""
        return Report.model_validate(self._ask("report", REPORTS.dump_python(request, mode="json")))

    def verify(self) -> Verification:
        """Replay the known answer there."""
        return Verification.model_validate(self._ask("verify", {}))

    def close(self) -> None:
        """End the child. May be called twice, and from another thread than the one that waits for an answer."""
        self._child.close()
        self._folder.cleanup()

    def _ask(self, what: str, given: dict[str, Any]) -> Any:
        with self._lock:
            number = next(self._numbers)
            try:
                answer = self._child.ask({"number": number, "what": what, "given": given}, PATIENCE_SECONDS)
                while answer["number"] != number:
                    answer = self._next()
            except ChildLostError as lost:
                raise ProviderError(
                    f"{self._names}: initialisation_failed: native code ended the process of the package: it {lost}; "
                    "partita.providers() says which provider starts at all"
                ) from lost
        raise_told(answer.get("error"))
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        """Another line of the child."""
        line = self._child.lines.get(timeout=PATIENCE_SECONDS)
        if line is None:
            raise self._child.give_up("ended while it was being queried")
        answer: dict[str, Any] = json.loads(line)
        return answer
