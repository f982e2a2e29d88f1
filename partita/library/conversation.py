"""A conversation that keeps its cache: each turn reads what is new, and what the template has changed of others.

The template is asked for the whole conversation in every turn. What its tokens have in common with those in the cache
stays there, and the row goes back to where they part; a state that cannot go back is read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os.path import commonprefix

from partita.library.engine.base import Engine
from partita.library.engine.requests import Piece, Ticket, Work
from partita.library.sampling import Sampling
from partita.options.fields import MAX_SEED
from partita.runtime.generate.text.chat_templates import Message
from partita.runtime.generate.text.tokens import Text


class Conversation:
    """Messages so far, and the request that has them in the cache. One thread uses it, and steps the engine."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        sampling: Sampling,
        *,
        messages: Sequence[Message] = (),
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> None:
        """`sampling`: completed; each turn draws with a seed of its own, which follows from its. `messages`: what was
        said before. `on_text` hears an answer as it comes.
        """
        self._engine, self._text, self._sampling, self._on_text = engine, text, sampling, on_text
        self._stop, self._stop_ids = tuple(stop), tuple(stop_ids)
        self.messages: list[Message] = list(messages)
        self.turns = 0
        self._reads = 0
        """Tokens of the last turn that its row did not have."""
        self._ticket: Ticket | None = None

    @property
    def read_tokens(self) -> int:
        """Tokens that the last turn had to read, of all that the conversation has."""
        return self._reads - (0 if self._ticket is None else self._ticket.copied_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of the conversation in the cache."""
        return 0 if self._ticket is None else len(self._ticket.history)

    @property
    def max_length(self) -> int:
        """Most tokens that a conversation can have."""
        return self._engine.manifest.graph.max_length

    def ask(self, message: str) -> Ticket:
        """Begin the answer to a message of the user; `finish` steps to its end.

        Raises GenerationError for a message that the template refuses, and for a conversation that the cache does not
        hold; it is as it was then. Raises UsageError without a chat template.
        """
        wanted = [*self.messages, {"role": "user", "content": message}]
        tokens = tuple(self._text.encode_messages(wanted))
        seed = self._sampling.seed
        sampling = self._sampling if seed is None else replace(self._sampling, seed=(seed + self.turns) & MAX_SEED)
        ticket = self._begin(tokens, sampling)
        self.turns += 1
        self.messages = wanted
        return ticket

    def finish(self) -> Ticket:
        """Step until the answer is over, and take it into the conversation. Raises what ended it; a message that was
        not answered at all is no part of the conversation then.
        """
        ticket = self._ticket
        assert ticket is not None
        try:
            while ticket.state != "over":
                self._engine.step()
        finally:
            answer = ticket.answer
            if answer.text or answer.finish_reason in ("stop", "length", "cache_full"):
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
            if ticket.state != "over":  # it was interrupted before it had a row, and nothing goes on after it
                ticket.cancel()
                self._ticket = None
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def reset(self, system: str | None = None) -> None:
        """Begin anew: with this message of the system, with the one there was, or without one where it is empty.

        Raises GenerationError for one that the template refuses; the conversation is as it was then.
        """
        kept = [message for message in self.messages[:1] if message["role"] == "system"]
        if system:
            kept = [{"role": "system", "content": system}]
            self._text.encode_messages([*kept, {"role": "user", "content": "1"}])
        self.messages = [] if system == "" else kept
        self._forget()

    def _begin(self, tokens: tuple[int, ...], sampling: Sampling) -> Ticket:
        """Go on with the request that has the conversation, or make another."""
        ticket = self._ticket
        history = () if ticket is None else ticket.history
        common = min(len(commonprefix([history, tokens])), len(tokens) - 1)
        if ticket is None or not common:
            work = Work(tokens, sampling, self._stop, self._stop_ids, stays=True)
            self._forget()
            ticket = self._ticket = self._engine.submit(work, self._hear)
            self._reads = len(tokens)
            return ticket
        stayed = common == len(history) or self._engine.rewind(ticket, len(history) - common)
        self._engine.extend(ticket, tokens[common:], sampling)
        self._reads = len(tokens) - common if stayed and ticket.row is not None else len(tokens)
        return ticket

    def _hear(self, ticket: Ticket, piece: Piece) -> None:
        if self._on_text is not None and piece.text:
            self._on_text(piece.text)

    def _forget(self) -> None:
        if self._ticket is not None:
            self._engine.release(self._ticket)
            self._ticket = None
