"""Prefixes as callers have them: tokens that a text begins with whatever follows, and prompts that go on with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

from partita.errors import GenerationError, UsageError
from partita.runtime.chat import conversation
from partita.runtime.prefix_file import Said
from partita.runtime.text import Text

ENDINGS = ("a", " b", "1", ".", "\n", "(", '"', "中")
"""What may follow a text. A tokenizer joins some of it with the end of the text, and a template trims some of it."""


def said_by_text(text: Text, begin: str, adapter: str | None = None) -> Said:
    """The prefix of prompts that begin with a text. Raises GenerationError for one without a token of its own."""
    return Said(_whatever_follows(lambda end: text.encode(begin + end)), text=begin, adapter=adapter)


def said_by_system(text: Text, system: str, adapter: str | None = None) -> Said:
    """The prefix of conversations with a message of the system, up to where the user's begins.

    Raises UsageError without a chat template, GenerationError when it refuses the message.
    """
    tokens = _whatever_follows(lambda end: text.encode_messages(conversation(end, system)))
    return Said(tokens, system=system, adapter=adapter)


def _whatever_follows(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Tokens that a text begins with, whatever follows."""
    tokens = tuple(commonprefix([list(encode(end)) for end in ENDINGS]))
    if not tokens:
        raise GenerationError("the prefix has no token that does not depend on what follows it; give more text")
    return tokens


def prompt_after(said: Said, prompt: str, text: Text, *, chat: bool = False) -> tuple[int, ...]:
    """Tokens of a prompt that goes on with a prefix: the same as of both in one piece.

    Raises UsageError for a prefix of another kind than the prompt.
    """
    if chat or said.system is not None:
        return tuple(text.encode_messages(conversation(prompt, system_of(said))))
    if said.text is None:
        raise UsageError("the prefix is one of token ids, which text cannot go on with; give token ids")
    return tuple(text.encode(said.text + prompt))


def ids_after(said: Said | None, ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that go on with a prefix, if there is one. Raises UsageError for one of text: what its last tokens are
    depends on what follows, so the file leaves them open.
    """
    if said is None:
        return tuple(ids)
    if said.text is not None or said.system is not None:
        raise UsageError("the prefix is one of text, which token ids cannot go on with; give text")
    return (*said.tokens, *ids)


def system_of(said: Said) -> str:
    """The message of the system that a prefix is of. Raises UsageError for one without."""
    if said.system is None:
        raise UsageError(
            "the prefix has no message of the system, so no conversation begins with it; save one that has"
        )
    return said.system
