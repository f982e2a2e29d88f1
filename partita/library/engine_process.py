"""The worker process of a `RemoteEngine`: it steps the engine, handles messages between steps, and pushes pieces.

After each step it pushes one `Update` with the pieces of all requests; it never waits for the parent.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from partita.errors import PartitaError
from partita.foreign.folder import Choice, open_folder
from partita.library.chain import ChainOptions, read_chain_options
from partita.library.engine import BatchOptions, Chunk, Opened, PrefixRequest, PrefixSaved, ReportRequest
from partita.library.jobs import pushing_audience
from partita.library.requests import Piece, Ticket, Work
from partita.library.run_report import Asked
from partita.library.sampling import Sampling
from partita.observations.facts import RunFacts
from partita.observations.records import ChainEntry, Environment
from partita.package_records import Evaluation, Verification
from partita.runtime.engine.recorder import Step
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.text import Text, load_text
from partita.runtime.worker.child import Channel, answer

if TYPE_CHECKING:
    from partita.library.local import LocalEngine


@dataclass(frozen=True, slots=True)
class EngineTask:
    """How the package is opened."""

    folder: Path
    where: ChainOptions
    choice: Choice
    observe: bool
    refusal_seconds: float
    with_text: bool
    """Load its tokenizer, too."""


class End(NamedTuple):
    """How a request ended."""

    error: PartitaError | None
    seconds: float
    """When, by `time.perf_counter`, which processes share."""
    row: int | None
    """The row that it keeps."""
    copied_tokens: int


class Update(NamedTuple):
    """What a step, or a message, has changed."""

    pieces: tuple[tuple[int, str, tuple[int, ...], tuple[TokenLogprobs, ...], str | None, End | None], ...]
    """Number of the request, fields of its `Piece`, and how it ended."""
    begun: tuple[tuple[int, float], ...] = ()
    """Requests that have got a row, and when."""
    stepped: tuple[int, ...] = ()
    """Requests with a row that want steps."""
    step: Step | None = None
    lost_by: PartitaError | None = None
    """The error of a run that ended requests."""


def run(channel: Channel) -> None:
    """Handle messages, and step while requests are open."""
    host = Host(channel)
    while not channel.closed:
        try:
            busy = host.has_work
            message = channel.poll() if busy else channel.receive()
            if message is not None:
                answer(channel, message, host.handlers)
                host.push()
            elif busy:
                host.step()
        except KeyboardInterrupt:  # it came after the call that was to be interrupted
            continue


class Host:
    """The engine of this process, and its requests by the numbers of the parent."""

    engine: LocalEngine

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._text: Text | None = None
        self._tickets: dict[int, Ticket] = {}
        self._waiting: dict[int, Ticket] = {}
        self._pieces: list[tuple[int, str, tuple[int, ...], tuple[TokenLogprobs, ...], str | None, End | None]] = []
        self._stepped: list[int] = []
        self._step: Step | None = None
        verbs = ("load", "open", "submit", "cancel", "extend", "rewind", "release", "report_facts", "verify")
        self.handlers = {verb: getattr(self, verb) for verb in (*verbs, "evaluate", "save_prefix")}

    @property
    def has_work(self) -> bool:
        """Requests are open."""
        return bool(self._tickets) and self.engine.wait(0)

    def step(self) -> None:
        """Make a step and push what it changed."""
        try:
            self.engine.step()
        except Exception:  # noqa: BLE001 - its requests have their errors, and the others go on
            traceback.print_exc()
        self.push()

    def push(self) -> None:
        """Push what has changed since the last push."""
        begun: tuple[tuple[int, float], ...] = ()
        if self._waiting:
            begun = tuple(
                (number, ticket.began) for number, ticket in self._waiting.items() if ticket.began is not None
            )
            for number, _ in begun:
                del self._waiting[number]
        if self._pieces or begun or self._step is not None:
            update = Update(tuple(self._pieces), begun, tuple(self._stepped), self._step, self.engine.lost_by)
            self._pieces, self._stepped, self._step = [], [], None
            self._channel.push(update)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def load(self, task: EngineTask) -> Opened:
        """Open the package."""
        from partita.library.local import LocalEngine

        target = read_chain_options(task.where)
        manifest = open_folder(task.folder, task.choice)
        self.engine = LocalEngine(
            task.folder,
            manifest,
            target,
            threads=task.where.threads,
            observe=task.observe,
            refusal_seconds=task.refusal_seconds,
            audience=pushing_audience(self._channel),
            choice=task.choice,
        )
        if task.with_text:
            self._text = load_text(task.folder, manifest.tokenizer, manifest.graph.max_length)
        return self.engine.opened

    def open(self, options: BatchOptions, longest: int | None, takes_turns: bool) -> Chunk:
        """Open a batch."""
        return self.engine.open(options, longest=longest, takes_turns=takes_turns)

    def submit(self, number: int, work: Work, with_text: bool, with_steps: bool) -> None:
        """Queue a request."""
        try:
            self.engine.use_text(self._text if with_text else None)
            ticket = self.engine.submit(work, self._listener(number), self._on_step if with_steps else None)
        except PartitaError as error:
            self._pieces.append((number, "", (), (), "error", End(error, 0.0, None, 0)))
            return
        self._tickets[number] = self._waiting[number] = ticket

    def cancel(self, number: int) -> None:
        """End a request, if it is not over."""
        if number in self._tickets:
            self._tickets[number].cancel()

    def extend(self, number: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Begin the next turn of a request."""
        ticket = self._tickets[number]
        self.engine.extend(ticket, tokens, sampling)
        self._waiting[number] = ticket

    def rewind(self, number: int, tokens: int) -> bool:
        """Remove tokens from the end of the history of a request."""
        return self.engine.rewind(self._tickets[number], tokens)

    def release(self, number: int) -> None:
        """Free the row of a request."""
        self.engine.release(self._tickets.pop(number))

    def report_facts(self, request: ReportRequest) -> tuple[RunFacts, tuple[ChainEntry, ...], Environment, Asked]:
        """What the partition report is made of."""
        return self.engine.report_facts(request)

    def verify(self, reference: str | None) -> Verification:
        """Replay the known answer."""
        return self.engine.verify(reference)

    def evaluate(self) -> Evaluation:
        """Measure the quality."""
        return self.engine.evaluate()

    def save_prefix(self, request: PrefixRequest) -> PrefixSaved:
        """Read a prefix and write it."""
        return self.engine.save_prefix(request)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _listener(self, number: int) -> Any:
        def hear(ticket: Ticket, piece: Piece) -> None:
            end = None
            if piece.finish_reason is not None:
                end = End(ticket.error, ticket.ended or 0.0, ticket.row, ticket.copied_tokens)
                if not ticket.work.stays:
                    self._tickets.pop(number, None)
            self._pieces.append((number, piece.text, piece.tokens, piece.logprobs, piece.finish_reason, end))

        return hear

    def _on_step(self, step: Step) -> None:
        self._step = step
        self._stepped = [
            number for number, ticket in self._tickets.items() if ticket.on_step is not None and ticket.row is not None
        ]
