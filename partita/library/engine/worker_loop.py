"""The worker process of a `RemoteEngine`: steps the engine, handles messages between steps, and sends updates.

Each step is an `Update` with the pieces of all requests. The worker never waits for the parent. A message wakes the
parent, which costs as much as a step of a small model, so updates of short steps are sent together.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from partita.errors import PartitaError
from partita.foreign.folder import Choice, open_folder
from partita.library.chain import Target
from partita.library.engine.base import OpenedPackage
from partita.library.engine.jobs import pushing_audience
from partita.library.engine.requests import RequestOutput, Ticket, Work
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.record import Step
from partita.runtime.generate.text.tokens import Text, load_text
from partita.runtime.worker.child import Channel, handle_message

if TYPE_CHECKING:
    from partita.library.engine.local import LocalEngine

SEND_SECONDS = 0.002
"""Steps that take less are short. Updates of consecutive short steps are sent at most this often, unless a request
begins or ends."""
End: TypeAlias = tuple[PartitaError | None, float, int]
"""How a request ended: error; time by `time.perf_counter`, which processes share; prompt tokens from the prefix
cache."""
Piece: TypeAlias = tuple[int, str, tuple[int, ...], tuple[TokenLogprobs, ...], str | None, End | None]
"""Number of a request, fields of its `RequestOutput`, and how it ended."""
Update: TypeAlias = tuple[tuple[Piece, ...], tuple[tuple[int, float], ...], tuple[Any, ...] | None, PartitaError | None]
"""Changes of a step or a message: pieces; requests that were given a row, and when; fields of the `Step`, if a request
wants them; the error of a run that ended requests. Plain tuples pickle 20 times as fast as records."""


def run(channel: Channel) -> None:
    """Handle messages, and step while requests are open."""
    host = Host(channel)
    busy = False
    while not channel.closed:
        try:
            message = channel.receive(timeout=0 if busy else None)
            if message is not None:
                handle_message(channel, message, host.handlers)
                host.send()
                busy = bool(host.tickets)
            elif busy:
                busy = host.step()
        except KeyboardInterrupt:  # it came after the call to interrupt
            continue


class Host:
    """The engine of this process, and its requests by the parent's numbers."""

    engine: LocalEngine

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._text: Text | None = None
        self.tickets: dict[int, Ticket] = {}
        """Unfinished requests."""
        self._waiting: dict[int, Ticket] = {}
        self._pieces: list[Piece] = []
        self._step: Step | None = None
        self._unsent: list[Update] = []
        self._sent_at = 0.0
        """When the last message was sent, by `time.perf_counter`."""
        self._is_short = False
        """Whether the last step was short, so that the next probably is, too."""
        self.handlers: dict[str, Callable[..., Any]] = {
            "load": self.load,
            "submit": self.submit,
            "cancel": lambda number: self.tickets[number].cancel() if number in self.tickets else None,
        }

    def step(self) -> bool:
        """Run a step, and send its update at once or with those of the next steps. False if there was nothing to do."""
        did, began = True, time.perf_counter()
        try:
            did = self.engine.step()
        except Exception:  # noqa: BLE001 - its requests have their errors, and others continue
            traceback.print_exc()
        changes, ended = self._add_update(), time.perf_counter()
        was_short, self._is_short = self._is_short, ended - began < SEND_SECONDS
        can_wait = did and not changes and was_short and self._is_short
        if not can_wait or ended - self._sent_at >= SEND_SECONDS:
            self.send()
        return did

    def send(self) -> None:
        """Send the updates since the last call."""
        self._add_update()
        if self._unsent:
            updates, self._unsent = self._unsent, []
            self._channel.push(updates)
            self._sent_at = time.perf_counter()

    def _add_update(self) -> bool:
        """Add an update with the changes since the last one; return whether a request began or ended."""
        begun: tuple[tuple[int, float], ...] = ()
        if self._waiting:
            begun = tuple((number, each.began) for number, each in self._waiting.items() if each.began is not None)
            for number, _ in begun:
                del self._waiting[number]
        pieces, step = self._pieces, self._step
        if not pieces and not begun and step is None:
            return False
        self._pieces, self._step = [], None
        self._unsent.append((tuple(pieces), begun, None if step is None else tuple(step), self.engine.lost_by))
        return bool(begun) or any(piece[-1] is not None for piece in pieces)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def load(
        self, folder: Path, target: Target, choice: Choice, *, observe: bool, refusal_seconds: float, text: bool
    ) -> OpenedPackage:
        """Open the package, and with `text` its tokenizer. Then other verbs are methods of the engine."""
        from partita.library.engine.local import LocalEngine

        manifest, audience = open_folder(folder, choice), pushing_audience(self._channel)
        self.engine = engine = LocalEngine(
            folder, manifest, target, choice, observe=observe, refusal_seconds=refusal_seconds, audience=audience
        )
        if text:
            self._text = load_text(folder, manifest.tokenizer, manifest.graph.max_length)
        for verb in ("open", "report_facts", "save_prefix"):
            self.handlers[verb] = getattr(engine, verb)
        return engine.opened

    def submit(self, number: int, work: Work, with_text: bool, with_steps: bool) -> None:
        """Queue a request."""

        def receive(ticket: Ticket, piece: RequestOutput) -> None:
            end = None
            if piece.finish_reason is not None:
                end = ticket.error, ticket.ended or 0.0, ticket.copied_tokens
                self.tickets.pop(number, None)
            self._pieces.append((number, *piece, end))

        try:
            self.engine.use_text(self._text if with_text else None)
            ticket = self.engine.submit(work, receive, self._on_step if with_steps else None)
        except PartitaError as error:
            self._pieces.append((number, "", (), (), "error", (error, 0.0, 0)))
            return
        self.tickets[number] = self._waiting[number] = ticket

    def _on_step(self, step: Step) -> None:
        self._step = step
