"""Requests that take turns in the rows of one batch: who comes first is served first, and a row that is free is given
to the next one at once.

One thread steps it; any thread may submit and cancel. What goes wrong in a row alone, or in making text of its tokens,
ends its request; what goes wrong in a run ends every request that is in the batch, and those that wait begin in a new
one. A listener that fails loses its own request: the others have got their tokens by then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from os.path import commonprefix
from typing import NoReturn

from partita.errors import GenerationError, PackageError, PartitaError, UsageError
from partita.library.edge import ArgumentError
from partita.library.engine import Begun, Engine, RowRequest
from partita.library.generation import Row
from partita.library.requests import Listener, Piece, Ticket, Work, check_work
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.observations.text_format import plural
from partita.runtime.engine.checks import check_budget, check_prompt
from partita.runtime.engine.prefix import most_shared
from partita.runtime.engine.recorder import Step
from partita.runtime.text import Text
from partita.spelling import read_by, reader, spelled

__all__ = ["Piece", "Scheduler", "Ticket", "Work"]
LOOKED_AT = 8
"""Of those who wait, to find what they begin with alike."""


class Scheduler:
    """The batch of a loaded package, shared by requests. Nothing else may generate with the package meanwhile."""

    def __init__(
        self,
        engine: Engine,
        text: Text | None,
        *,
        prefill_chunk: int | None = None,
        adapter: str | None = None,
        speculation: Speculation = NO_SPECULATION,
        prefix: str | None = None,
        on_step: Callable[[Step], object] | None = None,
    ) -> None:
        """`text`: the tokenizer; None: pieces have no text, and there are no stop strings. `on_step` hears of every
        step, before the listeners of requests. `speculation`: who guesses what follows in every row. `prefix`: file of
        a prefix; prompts that begin with its tokens are not read so far. Raises UsageError for a chunk that makes no
        sense, and where guesses cannot be confirmed; GenerationError for a prefix that is not of this package.
        """
        self._engine, self._text, self._on_step = engine, text, on_step
        self._how = prefill_chunk, adapter, speculation, prefix
        self._begun: Begun | None = engine.open(*self._how)
        """None: the batch is lost, and another one is to be opened."""
        self._limits, self._reader = self._begun, reader()
        self._rows: list[Ticket | None] = [None] * self._begun.rows
        """Those at work, and those that stay."""
        self._queue: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.copied_tokens = 0
        """Tokens of prompts that were copied so far, from a prefix or from other rows, and not read."""
        self.keeps: object = None
        """What is to last as long as requests are taken."""
        self.lost_by: PartitaError | None = None
        """What ended the last batch that was lost, with all requests in it."""
        self._displaced: str | None = None
        """What the model was asked since: no other batch is opened, which would end that."""

    @property
    def slots(self) -> int:
        """Rows of the batch."""
        return len(self._rows)

    @property
    def running(self) -> int:
        """Requests at work in a row."""
        return sum(ticket is not None and ticket.state == "running" for ticket in self._rows)

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._queue)

    @property
    def begun(self) -> Begun:
        """What is known of the batch: chunk, rows, lengths."""
        return self._limits

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a scheduler cannot be pickled or copied; load the package there, too")

    # --- any thread ---------------------------------------------------------------------------------------------------

    def submit(self, work: Work, listener: Listener | None = None) -> Ticket:
        """Have a request wait for its turn. `listener` hears its pieces, from the thread that steps.

        Raises GenerationError for a prompt that the package cannot take, and once the scheduler is closed; UsageError
        for an option.
        """
        with read_by(self._reader):
            check_work(work, self._limits)
            said = self._begin_saying(work.prompt, work.prompt, work)
        with self._changed:
            if self._closed:
                raise GenerationError("no request is taken any more: the scheduler is closed")
            ticket = Ticket(work, said, listener, self._wake)
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def displace(self, why: str | None) -> None:
        """The model is asked something else, as `why` says: requests that have no row by then end with that. None: it
        came to nothing.
        """
        self._displaced = why

    def wait(self, seconds: float | None = None) -> bool:
        """Block until `step` has something to do, or for so long; whether it has."""
        with self._changed:
            return self._changed.wait_for(self._has_work, seconds)

    # --- the thread that steps ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Give free rows to those who wait, and make one step of all rows. False when there was nothing to do.

        An error of the run ends the requests in the batch, and is not raised. Ctrl-C in the middle of it ends them with
        `interrupted`, and is: `Ticket.cancel` costs the others nothing. What a listener raises is raised, too, once
        all of them have heard.
        """
        did = self._end_cancelled() + self._admit()
        if not self.running or self._begun is None:
            return did > 0
        try:
            step = self._engine.step(self._begun.number)
            if step is None:
                raise GenerationError("the generation is over, and requests of it are not")
        except PartitaError as error:
            self._lose(error)
            return True
        except BaseException:
            self._lose(None)
            raise
        try:
            self._pass_on(step)
        except Exception:
            raise
        except BaseException:  # tokens of some rows are lost
            self._lose(None)
            raise
        return True

    def extend(self, ticket: Ticket, tokens: Sequence[int], sampling: Sampling) -> None:
        """A next turn of a request that stays: it reads `tokens` after all that it has, and answers as `sampling` says.

        What is no longer in a row is read anew. Raises GenerationError for tokens that it cannot take, UsageError.
        """
        history, given = self._at_rest(ticket), tuple(tokens)
        check_budget(sampling.max_new_tokens or 0)
        check_prompt(given, self._limits, "what follows")
        whole = (*history, *given)
        check_prompt(whole, self._limits, "what was said and what follows, together,", answered=True)
        said = self._begin_saying(given, whole, ticket.work)
        if ticket.row is not None and self._begun is not None:
            try:
                self._engine.extend(self._begun.number, ticket.row, given, sampling)
            except Exception:
                raise
            except BaseException:  # Ctrl-C: the engine may have given the row these tokens
                self._lose(None)
                raise
        ticket.begin_turn(history, said, sampling)
        with self._changed:
            if ticket.row is None:
                self._queue.append(ticket)
            else:
                ticket.state, ticket.began = "running", ticket.submitted
            self._changed.notify_all()

    def rewind(self, ticket: Ticket, tokens: int) -> bool:
        """Take a request that stays back by so many tokens of its history. False where its cache cannot go back: what
        is left is read anew with the next turn. Raises GenerationError unless a token is left.
        """
        history = self._at_rest(ticket)
        if not 0 < tokens < len(history):
            raise GenerationError(f"a history of {plural(len(history), 'token')} cannot go back by {tokens}")
        begun = self._begun
        back = ticket.row is not None and begun is not None and self._engine.rewind(begun.number, ticket.row, tokens)
        if not back:
            self._free(ticket)
        elif ticket.row is not None and begun is not None:
            self._halt(ticket.row, begun)
        ticket.begin_turn(history[:-tokens], Row((), None), ticket.sampling)
        ticket.state = "over"
        return back

    def release(self, ticket: Ticket) -> None:
        """Free the row of a request that stays. Nothing for one that has none."""
        if ticket.state == "over":
            self._free(ticket)
            ticket.released = True

    def close(self) -> None:
        """End everything: requests that are not over end with `interrupted`. The package stays open."""
        with self._changed:
            self._closed = True
            left = [*(ticket for ticket in self._rows if ticket is not None), *self._queue]
            self._queue.clear()
        for ticket in left:
            pieces = [(ticket, self._over(ticket, "interrupted"))] if ticket.state != "over" else []
            self._free(ticket)
            with suppress(Exception):  # nobody is to be told of what is wrong with who listens, at the end
                _tell(pieces)
        self.keeps = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin_saying(self, prompt: tuple[int, ...], before: tuple[int, ...], work: Work) -> Row:
        """What a turn has said when it begins. `before`: all tokens before the answer."""
        if self._text is None:
            if work.stop:
                raise UsageError(f"{spelled('stop')} is a text, and there is no tokenizer; give token ids to stop at")
            return Row(prompt, None)
        return Row(prompt, self._text.stream(before, work.stop, work.stop_ids))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_work(self) -> bool:
        listed = [*self._queue, *filter(None, self._rows)]
        ending = any(ticket.cancelled and ticket.state != "over" for ticket in listed)
        return ending or self.running > 0 or (bool(self._queue) and self._can_begin())

    def _can_begin(self) -> bool:
        """Whether a row is free, and may begin while the others are where they are."""
        return None in self._rows and (self._limits.rows_apart or not any(self._rows)) and self._goes_beside()

    def _goes_beside(self) -> bool:
        """Whether the first who waits may begin: nobody overtakes it for ever because it does not fit."""
        with self._changed:
            first = self._queue[0] if self._queue else None
        return first is None or self._fits(first)

    def _fits(self, ticket: Ticket) -> bool:
        """Whether a request and those at work make no difference to each other."""
        limit = self._limits.alone_beyond
        beside = [other for other in self._rows if other is not None]
        if not beside:
            return True
        alike = self._limits.adapters_by_row or all(self._adapter(other) == self._adapter(ticket) for other in beside)
        return alike and (limit is None or all(other.longest <= limit for other in (ticket, *beside)))

    def _end_cancelled(self) -> int:
        """End those that were cancelled; how many."""
        with self._changed:
            gone = [ticket for ticket in self._queue if ticket.cancelled]
            for ticket in gone:
                self._queue.remove(ticket)
        gone += [ticket for ticket in self._rows if ticket is not None and ticket.cancelled]
        gone = [ticket for ticket in gone if ticket.state != "over"]
        _tell([(ticket, self._over(ticket, "interrupted")) for ticket in gone])
        return len(gone)

    def _admit(self) -> int:
        """Give free rows to those who wait, in their order; how many were dealt with.

        Where rows cannot begin apart, those begin together whose prompts are as long as that of the first.
        """
        if not self._can_begin():
            return 0
        done, length = 0, None
        while None in self._rows and self._goes_beside() and (ticket := self._next(length)) is not None:
            done += 1
            if not self._limits.rows_apart:
                length = len(ticket.history)
            self._begin(ticket)
        return done

    def _next(self, length: int | None) -> Ticket | None:
        """Take the first who waits out of the queue; the first with a prompt of `length` tokens, where that matters."""
        with self._changed:
            for ticket in self._queue:
                if length in (None, len(ticket.history)) and self._fits(ticket):
                    self._queue.remove(ticket)
                    return ticket
        return None

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row; an error there is its own. Where the batch is lost, it waits for the next one."""
        work, had = ticket.work, self._begun is not None
        try:
            if self._begun is None and self._displaced is not None:
                raise GenerationError(self._displaced)
            if self._begun is None:
                self._begun = self._engine.open(*self._how)
            asked = RowRequest(ticket.history, ticket.sampling, work.stop_ids, work.logprobs)
            request = replace(asked, shares=self._shared(ticket), adapter=work.adapter, trial=work.trial)
            row = self._engine.join(self._begun.number, request)
        except PartitaError as error:
            damaged = isinstance(error, PackageError) and self._begun is not None  # the file of its adapter
            own = damaged or isinstance(error, (GenerationError, UsageError))
            if self._displaced is not None or not own:
                if had:
                    self._wait_again(ticket)
                self._lose(error)
                if had:
                    return
            _tell([(ticket, self._over(ticket, "error", error))])
            return
        except Exception as error:  # want of memory, say: whoever waits for it must hear
            said = GenerationError(f"it could not begin: {type(error).__name__}: {error}")
            self.lost_by = self.lost_by or said  # it is not this request's own: nobody is to take it for its answer
            _tell([(ticket, self._over(ticket, "error", said))])
            raise
        except BaseException:  # Ctrl-C: it is to end with the others that wait; the engine may have given it the row
            self._wait_again(ticket)
            self._lose(None)
            raise
        self._rows[row] = ticket
        ticket.row, ticket.state, ticket.began = row, "running", time.perf_counter()

    def _wait_again(self, ticket: Ticket) -> None:
        """Put a request that was taken out of the queue back to its head."""
        with self._changed:
            self._queue.appendleft(ticket)

    def _shared(self, ticket: Ticket) -> int:
        """Tokens that those who wait begin with, too: what is read of them is kept for them."""
        with self._changed:
            waiting = [
                other for other in islice(self._queue, LOOKED_AT) if self._adapter(other) == self._adapter(ticket)
            ]
            begin = [other.history for other in waiting]
        return most_shared([len(commonprefix([ticket.history, other])) for other in begin])

    def _adapter(self, ticket: Ticket) -> str | None:
        """The adapter that a request is answered with."""
        return self._how[1] if ticket.work.adapter is None else ticket.work.adapter

    def _pass_on(self, step: Step) -> None:
        """Have every request take what a step gave its row, and tell all of them."""
        self.copied_tokens += sum(step.copied)
        pieces, wrong = list[tuple[Ticket, Piece]](), None
        for ticket in [ticket for ticket in self._rows if ticket is not None]:
            try:
                piece = self._take(ticket, step)
            except Exception as error:  # noqa: BLE001 - its own: the others go on
                wrong = wrong or (None if isinstance(error, PartitaError) else error)
                piece = self._fail(ticket, error)
            if piece is not None:
                pieces.append((ticket, piece))
        if self._on_step is not None:
            self._on_step(step)
        _tell(pieces)
        if wrong is not None:
            raise wrong

    def _fail(self, ticket: Ticket, error: Exception) -> Piece:
        """End a request whose tokens make no text; nothing more is asked of what makes it."""
        said = f"its tokens make no text: {type(error).__name__}: {error}"
        ticket.said.finish = "error"
        ticket.state, ticket.ended = "over", time.perf_counter()
        ticket.error = error if isinstance(error, PartitaError) else GenerationError(said)
        self._free(ticket)
        return Piece("", (), (), "error")

    def _take(self, ticket: Ticket, step: Step) -> Piece | None:
        """What a step added to a request; None when that is nothing."""
        row = ticket.row
        if row is None or ticket.state != "running":
            return None
        said, new = ticket.said, step.tokens[row]
        ticket.copied_tokens += step.copied[row] if step.copied else 0
        before = len(said.pieces)
        taken = said.take(new, step.finish[row])
        if taken and ticket.first_token is None:
            ticket.first_token = time.perf_counter()
        text = "".join(said.pieces[before:])
        logprobs = step.logprobs[row][: len(taken)] if step.logprobs else ()
        if said.finish is None:
            return Piece(text, taken, logprobs, None) if taken or text else None
        wrong = step.errors[row] if step.errors else None
        self._over(
            ticket, said.finish, None if wrong is None else GenerationError(wrong), surplus=len(new) - len(taken)
        )
        return Piece(text, taken, logprobs, said.finish)

    def _over(self, ticket: Ticket, reason: str, error: PartitaError | None = None, surplus: int = 0) -> Piece:
        """End a request, and free its row unless it stays there; its last piece. `surplus`: tokens that its row has
        beyond what it has said.
        """
        said = ticket.said
        before = len(said.pieces)
        said.end()
        said.finish = reason
        ticket.state, ticket.error, ticket.ended = "over", error, time.perf_counter()
        if ticket.row is not None and self._begun is not None:
            if ticket.work.stays and error is None and self._limits.rows_rest:
                self._halt(ticket.row, self._begun, surplus)
            else:
                self._free(ticket)
        return Piece("".join(said.pieces[before:]), (), (), reason)

    def _halt(self, row: int, begun: Begun, surplus: int = 0) -> None:
        """Let a row end where its request has ended."""
        with suppress(PartitaError):  # that the batch is lost shows in the next step
            if surplus:
                self._engine.rewind(begun.number, row, surplus)
            self._engine.halt(begun.number, row)

    def _free(self, ticket: Ticket) -> None:
        """Take a request out of its row, if it has one."""
        row, ticket.row = ticket.row, None
        if row is None:
            return
        self._rows[row] = None
        if self._begun is not None:
            with suppress(PartitaError):  # as above
                self._engine.leave(self._begun.number, row)

    def _lose(self, error: PartitaError | None) -> None:
        """The batch is lost: all that are at work in it are over."""
        self._begun, self.lost_by = None, error or self.lost_by
        lost = [ticket for ticket in self._rows if ticket is not None]
        self._rows = [None] * len(self._rows)
        for ticket in lost:
            ticket.row = None
        reason = "interrupted" if error is None else "error"
        _tell([(ticket, self._over(ticket, reason, error)) for ticket in lost if ticket.state == "running"])

    def _at_rest(self, ticket: Ticket) -> tuple[int, ...]:
        """The history of a request that stays and is over. Raises GenerationError for another."""
        if ticket.state != "over" or not ticket.work.stays or ticket.released or self._closed:
            raise GenerationError("this request cannot go on: it is not over, or was not to stay, or was released")
        return ticket.history


def _tell(pieces: Sequence[tuple[Ticket, Piece]]) -> None:
    """Have listeners hear their pieces. One that fails is to hear no more; what the first one raised is raised again
    when all have heard.
    """
    wrong: Exception | None = None
    for ticket, piece in pieces:
        if ticket.listener is None:
            continue
        try:
            ticket.listener(ticket, piece)
        except Exception as error:  # noqa: BLE001 - raised below
            wrong, ticket.listener = wrong or error, None
            ticket.cancel()
    if wrong is not None:
        raise wrong
