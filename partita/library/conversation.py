"""A chat: the template renders the whole conversation in every turn, and the prefix cache has most of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from partita.library.engine.base import Engine
from partita.library.engine.requests import RequestOutput, Ticket, Work
from partita.library.sampling import Sampling
from partita.options.fields import MAX_SEED
from partita.runtime.generate.text.chat_templates import Message
from partita.runtime.generate.text.tokens import Text


class Conversation:
    """The messages so far. One thread uses it and steps the engine."""

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
        """`sampling`: with all values set; each turn has its own seed derived from it. `messages`: earlier messages.
        `on_text` is called with the text of an answer as it is generated."""
        self._engine, self._text, self._sampling, self._on_text = engine, text, sampling, on_text
        self._stop, self._stop_ids = tuple(stop), tuple(stop_ids)
        self.messages: list[Message] = list(messages)
        self.turns = 0
        self._ticket: Ticket | None = None
        """The request of the last turn."""

    @property
    def read_tokens(self) -> int:
        """Number of tokens that the last turn prefilled."""
        ticket = self._ticket
        return 0 if ticket is None else len(ticket.work.prompt) - ticket.copied_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of the conversation."""
        ticket = self._ticket
        return 0 if ticket is None else len(ticket.work.prompt) + len(ticket.tokens)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a conversation."""
        return self._engine.manifest.graph.max_length

    def ask(self, message: str) -> Ticket:
        """Begin the answer to a user message; `finish` steps to its end.

        Raises GenerationError, without a change, for a message that the template rejects and for a conversation longer
        than the cache. Raises UsageError without a chat template.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        tokens = tuple(self._text.encode_messages(messages))
        seed = self._sampling.seed
        sampling = self._sampling if seed is None else replace(self._sampling, seed=(seed + self.turns) & MAX_SEED)
        self._ticket = self._engine.submit(Work(tokens, sampling, self._stop, self._stop_ids), self._receive)
        self.turns += 1
        self.messages = messages
        return self._ticket

    def finish(self) -> Ticket:
        """Step until the answer is complete, and add it to the conversation.

        Raises the error that ended it; a message without any answer is removed from the conversation then.
        """
        ticket = self._ticket
        assert ticket is not None
        try:
            while ticket.state != "finished":
                self._engine.step()
        finally:
            answer = ticket.result
            if answer.text or answer.finish_reason in ("stop", "length", "cache_full"):
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
            if ticket.state != "finished":  # interrupted before it had a row, so nothing will finish it
                ticket.cancel()
                self._ticket = None
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def reset(self, system: str | None = None) -> None:
        """Begin again: with this system message, with the current one (None), or without one (empty).

        Raises GenerationError, without a change, if the template rejects it.
        """
        messages = [message for message in self.messages[:1] if message["role"] == "system"]
        if system:
            messages = [{"role": "system", "content": system}]
            self._text.encode_messages([*messages, {"role": "user", "content": "1"}])
        self.messages = [] if system == "" else messages
        self._ticket = None

    def _receive(self, ticket: Ticket, piece: RequestOutput) -> None:
        if self._on_text is not None and piece.text:
            self._on_text(piece.text)
