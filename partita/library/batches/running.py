"""The rows of a file through the scheduler: as many at a time as the batch has, and the next as soon as one ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from partita.errors import GenerationError, PartitaError, UsageError
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowDefaults, answered, failed, note_unread, work_of
from partita.library.requests import Piece, Ticket
from partita.library.scheduler import Scheduler
from partita.runtime.logprobs import TokenLogprobs
from partita.runtime.text import Text
from partita.spelling import read_as_fields

AHEAD = 64
"""Rows that are ready when one ends, at least: where prompts have to be equally long, some of them may fit together."""


@dataclass(slots=True)
class BatchRun:
    """A run over rows, and how far it is."""

    scheduler: Scheduler
    text: Text | None
    defaults: RowDefaults
    journal: Journal
    heard: Callable[[BatchRun], object] = lambda _: None
    """Called after every step."""
    tokens: int = 0
    """New tokens, also of rows that are not done."""
    prompt_tokens: int = 0
    """Of rows that have begun."""
    unread: set[str] = field(default_factory=set)
    """Fields of rows that mean nothing here."""
    _logprobs: dict[Ticket, list[TokenLogprobs]] = field(default_factory=dict)
    _rows: dict[Ticket, InputRow] = field(default_factory=dict)
    _unread: PartitaError | None = None
    """What keeps the rows behind those that are at work from being read, or asked for."""

    def go(self, rows: Iterable[InputRow]) -> None:
        """Answer every row that has no answer yet.

        A row's own error is its answer. Raises what ends the run: ProviderError and others of a run of the model,
        ResourceError of the journal, KeyboardInterrupt. Rows that were at work then have no answer. What reading or
        asking for rows raises, and is not a row's own, comes when those at work have theirs.
        """
        source = (row for row in rows if row.index not in self.journal)
        try:
            while self._feed(source) | self.scheduler.step():
                if self.scheduler.lost_by is not None:
                    raise self.scheduler.lost_by
                self.heard(self)
        finally:
            self._rows.clear()  # what is interrupted now is no answer
            self.scheduler.close()
        if self._unread is not None:
            raise self._unread

    def _feed(self, source: Iterator[InputRow]) -> bool:
        """Have enough rows wait; whether there was one."""
        fed = False
        while self.scheduler.waiting < max(AHEAD, self.scheduler.slots):
            try:
                row = next(source, None)
            except PartitaError as error:  # a generator that has raised has no more
                self._unread, row = error, None
            if row is None or self._unread is not None:
                break
            fed = True
            self._submit(row)
        return fed

    def _submit(self, row: InputRow) -> None:
        note_unread(self.unread, row)
        try:
            work = work_of(row, self.defaults, self.text, self.scheduler.begun.vocab_size)
            with read_as_fields(row.fields):
                ticket = self.scheduler.submit(work, self._hear)
        except (GenerationError, UsageError) as error:
            self.journal.append(failed(row, error))
            return
        except PartitaError as error:  # a tokenizer that does not load, say: no other row would fare better
            self._unread = error
            return
        self._rows[ticket] = row
        if work.logprobs is not None:
            self._logprobs[ticket] = []

    def _hear(self, ticket: Ticket, piece: Piece) -> None:
        """Keep the answer of a row that is done."""
        self.tokens += len(piece.tokens)
        if ticket in self._logprobs:
            self._logprobs[ticket] += piece.logprobs
        if (
            piece.finish_reason in (None, "interrupted")
            or ticket not in self._rows
            or self.scheduler.lost_by is not None
        ):
            return
        row, told = self._rows.pop(ticket), self._logprobs.pop(ticket, None)
        self.prompt_tokens += ticket.answer.prompt_tokens
        if ticket.error is not None:
            self.journal.append(failed(row, ticket.error))
        else:
            self.journal.append(answered(row, ticket.answer, told, with_text=self.text is not None))
