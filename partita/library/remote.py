"""A package loaded in a child process, because a provider's native code may end the process that it is in.

The child is asked one thing at a time, in JSON, with a number that its answer repeats: what it still has to say after a
Ctrl-C here is not taken for the answer to the next question.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from partita.errors import GenerationError, ProviderError
from partita.files import temporary_directory
from partita.foreign.folder import AS_IT_IS, Choice
from partita.library.audience import LOGGER
from partita.library.chain import ChainOptions
from partita.library.crashes import CRASHES
from partita.library.crossing import FAREWELL, raise_told
from partita.library.engine import (
    CLOSED,
    FORKED,
    Begun,
    GenerateRequest,
    Opened,
    PrefixRequest,
    PrefixSaved,
    ReportRequest,
    RowRequest,
)
from partita.library.notes import gave_up
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.observations.names import CPU
from partita.package_records import Verification
from partita.partition_reports.records import Report
from partita.remedies import Remedy
from partita.runtime.engine.recorder import Step
from partita.runtime.evaluation import Evaluation
from partita.runtime.process.live_child import ChildLostError, LiveChild

CHILD = "partita.library.host"
PATIENCE_SECONDS = 30.0 * 24 * 3600
"""A step of a large model on a slow device may take long, and whoever waits for it can press Ctrl-C."""
REQUESTS = TypeAdapter(GenerateRequest)
PREFIXES = TypeAdapter(PrefixRequest)
SAVED = TypeAdapter(PrefixSaved)
REPORTS = TypeAdapter(ReportRequest)
ROWS = TypeAdapter(RowRequest)
SAMPLINGS = TypeAdapter(Sampling)
OPENED = TypeAdapter(Opened)
BEGUN = TypeAdapter(Begun)
STEPS = TypeAdapter(Step)
DURING = {
    "begin": "generation",
    "open": "generation",
    "join": "generation",
    "leave": "generation",
    "halt": "generation",
    "extend": "generation",
    "rewind": "generation",
    "step": "generation",
    "save_prefix": "reading a prefix",
    "report": "the report",
    "verify": "verification",
    "evaluate": "evaluation",
}
"""What goes on in the child, by what it was asked."""
LOAD_AGAIN = Remedy("load the package again")
WITHOUT = Remedy("leave {provider} out of the chain")


class RemoteEngine:
    """A loaded package in a process of its own. See `engine.Engine`."""

    def __init__(self, folder: Path, where: ChainOptions, *, observe: bool, choice: Choice = AS_IT_IS) -> None:
        """Start the child and open the package there. Raises what `LocalEngine` does, and ProviderError for a crash, as
        everything here does.
        """
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._names = where.provider or ""
        self._lost: ProviderError | None = None
        """How the child ended, once it has."""
        self._closed = False
        self._begun = 0
        self._gave_up: set[str] = set()
        """Why nobody guesses any more, as it was told."""
        self._reported: tuple[int, Report] | None = None
        """The last report, and the generation that it is about."""
        self._process = os.getpid()
        self._folder = temporary_directory()
        try:
            folder_of_child = Path(self._folder.name) / "child"
            self._child = LiveChild(CHILD, folder_of_child, (self._folder.name,), FAREWELL)
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            given = {
                "package": str(folder),
                "where": asdict(where),
                "observe": observe,
                "choice": choice.to_json(),
            }
            self.opened = OPENED.validate_python(self._ask("load", given))
        except BaseException:
            self.close()
            raise

    def begin(self, request: GenerateRequest) -> Begun:
        """Begin a generation there."""
        self._gave_up = set()
        begun = BEGUN.validate_python(self._ask("begin", REQUESTS.dump_python(request, mode="json")))
        self._begun = begun.number
        return begun

    def open(
        self,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
    ) -> Begun:
        """Begin a generation there whose rows are all free."""
        self._gave_up = set()
        given = {"prefill_chunk": prefill_chunk, "adapter": adapter, "speculation": asdict(speculation)}
        begun = BEGUN.validate_python(self._ask("open", {**given, "prefix": prefix}))
        self._begun = begun.number
        return begun

    def join(self, number: int, request: RowRequest) -> int:
        """Give a request a free row of the generation there; its index."""
        given = {"number": number, "request": ROWS.dump_python(request, mode="json")}
        return int(self._ask("join", given))

    def leave(self, number: int, row: int) -> None:
        """Free a row there, finished or not."""
        self._ask("leave", {"number": number, "row": row})

    def halt(self, number: int, row: int) -> None:
        """End a row there where it is; it keeps what it has."""
        self._ask("halt", {"number": number, "row": row})

    def extend(self, number: int, row: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Give a row there more tokens to read, and go on after them as `sampling` says."""
        given = {"tokens": [int(token) for token in tokens], "sampling": SAMPLINGS.dump_python(sampling, mode="json")}
        self._ask("extend", {"number": number, "row": row, **given})

    def rewind(self, number: int, row: int, tokens: int) -> bool:
        """Take a row there back by so many of its tokens; False where it cannot go back."""
        return bool(self._ask("rewind", {"number": number, "row": row, "tokens": tokens}))

    def step(self, number: int) -> Step | None:
        """The next step; None when there is none."""
        answer = self._ask("step", {"number": number})
        step = None if answer is None else STEPS.validate_python(answer)
        for line in () if step is None else gave_up(step.gave_up, self._gave_up):
            LOGGER.warning(line)  # the child has nobody to tell
        return step

    def save_prefix(self, request: PrefixRequest) -> PrefixSaved:
        """Read a prefix there, and have the child write the file."""
        return SAVED.validate_python(self._ask("save_prefix", PREFIXES.dump_python(request, mode="json")))

    def report(self, request: ReportRequest) -> Report:
        """The report of the last generation; when the child is gone, the one that was made of it before."""
        if self._lost is not None and self._reported is not None and self._reported[0] == self._begun:
            return self._reported[1]
        report = Report.model_validate(self._ask("report", REPORTS.dump_python(request, mode="json")))
        self._reported = (self._begun, report)
        return report

    def verify(self, reference: str | None = None) -> Verification:
        """Replay the known answer there, or that of `reference`."""
        return Verification.model_validate(self._ask("verify", {"reference": reference}))

    def evaluate(self) -> Evaluation:
        """Measure the quality of the package there."""
        return Evaluation(**self._ask("evaluate", {}))

    def close(self) -> None:
        """End the child. May be called twice, and from another thread than the one that waits for an answer."""
        self._closed = True
        self._child.close()
        self._folder.cleanup()

    def _ask(self, what: str, given: dict[str, Any]) -> Any:
        if os.getpid() != self._process:
            raise GenerationError(FORKED)
        with self._lock:
            if self._closed:
                raise GenerationError(CLOSED)
            if self._lost is not None:
                raise ProviderError(self._lost.said, remedy=LOAD_AGAIN) from self._lost
            number = next(self._numbers)
            try:
                answer = self._child.ask({"number": number, "what": what, "given": given}, PATIENCE_SECONDS)
                while answer["number"] != number:
                    answer = self._next()
            except ChildLostError as lost:
                if self._closed:
                    raise GenerationError(CLOSED) from lost
                self._lost = self._without_child(what, lost)
                raise self._lost from lost
        raise_told(answer.get("error"))
        return answer["result"]

    def _without_child(self, what: str, lost: ChildLostError) -> ProviderError:
        """The error for a child that gave no answer: a provider that does not start, or one that fails at work."""
        if what not in DURING:
            return ProviderError(
                f"{self._names}: initialisation_failed: native code ended the process of the package: it {lost}; "
                "partita.providers() says which provider starts at all"
            )
        ended = "crashed" if -(self._child.process.returncode or 0) in CRASHES else "ended"
        others = [name for name in self._names.split(",") if name != CPU]
        otherwise = WITHOUT.filled(provider=" or ".join(others)) if others else None
        return ProviderError(
            f"{self._names}: the child process {ended} during {DURING[what]}: it {lost}",
            remedy=replace(LOAD_AGAIN, otherwise=otherwise),
        )

    def _next(self) -> dict[str, Any]:
        """Another line of the child."""
        line = self._child.lines.get(timeout=PATIENCE_SECONDS)
        if line is None:
            raise self._child.give_up("ended while it was being queried")
        answer: dict[str, Any] = json.loads(line)
        return answer
