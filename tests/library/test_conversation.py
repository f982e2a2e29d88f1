"""Conversations: each turn has the tokens of a full prefill but prefills only new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError
from partita.library.chain import read_chain
from partita.library.engine.local import LocalEngine
from partita.library.generation import Conversation
from partita.library.sampling import Sampling
from partita.options.generation import BatchOptions
from partita.options.groups import ProviderChain
from partita.package.folder import read_manifest
from tests.runtime.handmade_packages import ALL, LENGTH, handmade, known_tokens

ROLES = {"system": 61, "user": 62, "assistant": 63}
END = 60
SYSTEM = "4 5 6 7 8 9 4 3 2 1 11 12 13 14"


class Numbers:
    """A tokenizer and template for texts that are numbers: `7 8 9`. `forgets`: the template leaves the first word out
    of what the assistant said before the last message, as some do with thoughts.
    """

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            words = [int(word) for word in message["content"].split()]
            forgotten = self.forgets and message["role"] == "assistant"
            ids += [ROLES[message["role"]], *words[forgotten:], END]
        return [*ids, ROLES["assistant"]]

    def stream(self, prompt: Sequence[int] = (), stops: Sequence[str] = (), stop_ids: Sequence[int] = ()) -> Numbers:
        return self

    stopped = False

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Any]:
    """Open a handmade package, and begin a conversation on it."""
    engines: list[LocalEngine] = []

    def factory(states: Sequence[str] = ALL, batch: int = 1, *, forgets: bool = False, count: int = 3) -> Conversation:
        folder = handmade(tmp_path / str(len(engines)), states=states, batch=batch)
        where = read_chain(ProviderChain(providers="cpu", threads=1))
        engine = LocalEngine(folder, read_manifest(folder), where, observe=False)
        engines.append(engine)
        text: Any = Numbers(forgets=forgets)
        sampling = Sampling(temperature=0.0, max_new_tokens=count)
        engine.use_text(text)
        engine.open(BatchOptions())
        return Conversation(engine, text, sampling, messages=[{"role": "system", "content": SYSTEM}], on_text=print)

    yield factory
    for engine in engines:
        engine.close()


def turn(conversation: Conversation, message: str) -> list[int]:
    conversation.ask(message)
    return list(conversation.finish().result.tokens)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("states", [("key",), ALL], ids=["keys", "states"])
def test_every_turn_matches_full_prefill_of_conversation(talk, states, batch, forgets):
    conversation = talk(states, batch, forgets=forgets)
    read = []
    for message in ("7 8", "9", "1 2 3"):
        wanted = conversation._text.encode_messages([*conversation.messages, {"role": "user", "content": message}])
        assert turn(conversation, message) == known_tokens(wanted, 3, states)
        read.append((conversation._ticket.prefilled_tokens, len(wanted)))
    changed = 3 + 1 if forgets else 0  # the answer without its first word, read once more
    assert read[0][0] == read[0][1]
    assert all(taken <= len([39, END, 62, 1, 2, 3, END, 63]) + changed for taken, _ in read[1:])


def test_reset_restores_or_replaces_system_message(talk):
    conversation = talk(("key",))
    first = turn(conversation, "7 8")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": SYSTEM}]
    assert turn(conversation, "7 8") == first
    conversation.reset("9")
    assert turn(conversation, "7 8") == known_tokens([61, 9, 60, 62, 7, 8, 60, 63], 3, ("key",))


def test_overlong_message_is_rejected_and_conversation_is_unchanged(talk):
    conversation = talk(("key",))
    turn(conversation, "7 8")
    before = list(conversation.messages)
    for count in (LENGTH, LENGTH - 10):
        with pytest.raises(GenerationError, match=f"the cache length is {LENGTH}"):
            conversation.ask(" ".join("1" * count))
    assert conversation.messages == before
    wanted = conversation._text.encode_messages([*before, {"role": "user", "content": "9"}])
    assert turn(conversation, "9") == known_tokens(wanted, 3, ("key",))


def test_interrupted_response_is_part_of_conversation(talk):
    conversation = talk(("key",), count=30)
    ticket = conversation.ask("7 8")
    for _ in range(3):
        conversation._engine.step()
    ticket.cancel()
    assert conversation.finish().result.finish_reason == "interrupted"
    wanted = conversation._text.encode_messages([*conversation.messages, {"role": "user", "content": "9"}])
    conversation.ask("9")
    tokens = list(conversation.finish().result.tokens)
    assert conversation._ticket.prefilled_tokens <= 6, "the cache is good"
    assert tokens == known_tokens(wanted, len(tokens), ("key",)) and tokens


def test_message_without_response_is_removed(talk):
    conversation = talk(("key",))
    conversation.ask("7 8").cancel()
    assert conversation.finish().result.tokens == ()
    assert conversation.messages == [{"role": "system", "content": SYSTEM}]
