"""Turns of `partita chat`: each turn has the tokens of a full prefill but prefills only new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.commands.chat import Session
from partita.errors import INTERRUPTED, GenerationError
from partita.library.chain import read_chain
from partita.library.engine.local import LocalEngine
from partita.options.generation import BatchOptions, ChatCommand
from partita.options.groups import ProviderChain
from partita.package.folder import read_manifest
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.text.chat_templates import Message
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
    """Open a handmade package, and begin a chat on it."""
    engines: list[LocalEngine] = []

    def factory(states: Sequence[str] = ALL, batch: int = 1, *, forgets: bool = False, count: int = 3) -> Session:
        folder = handmade(tmp_path / str(len(engines)), states=states, batch=batch)
        where = read_chain(ProviderChain(providers="cpu", threads=1))
        engine = LocalEngine(folder, read_manifest(folder), where, observe=False)
        engines.append(engine)
        text: Any = Numbers(forgets=forgets)
        options, lines = (
            ChatCommand(package=folder, temperature=0.0, max_new_tokens=count),
            SimpleNamespace(typed=False),
        )
        engine.use_text(text)
        engine.open(BatchOptions())
        return Session(options, engine, text, [{"role": "system", "content": SYSTEM}], lines)  # type: ignore[arg-type]

    yield factory
    for engine in engines:
        engine.close()


def turn(session: Session, message: str) -> list[int]:
    session._answer(message)
    assert session.last is not None
    return list(session.last.result.tokens)


def prompt(session: Session, message: str) -> list[int]:
    """The tokens of a session that goes on with this message."""
    said: list[Message] = [*session.messages, {"role": "user", "content": message}]
    return session.text.encode_messages(said)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("states", [("key",), ALL], ids=["keys", "states"])
def test_every_turn_matches_full_prefill_of_session(talk, states, batch, forgets):
    session = talk(states, batch, forgets=forgets)
    read = []
    for message in ("7 8", "9", "1 2 3"):
        wanted = prompt(session, message)
        assert turn(session, message) == known_tokens(wanted, 3, states)
        read.append((session.last.prefilled_tokens, len(wanted)))
    changed = 3 + 1 if forgets else 0  # the answer without its first word, read once more
    assert read[0][0] == read[0][1]
    assert all(taken <= len([39, END, 62, 1, 2, 3, END, 63]) + changed for taken, _ in read[1:])


def test_reset_restores_or_replaces_system_message(talk):
    session = talk(("key",))
    first = turn(session, "7 8")
    session._reset()
    assert session.messages == [{"role": "system", "content": SYSTEM}]
    assert turn(session, "7 8") == first
    session._reset("9")
    assert turn(session, "7 8") == known_tokens([61, 9, 60, 62, 7, 8, 60, 63], 3, ("key",))


def test_overlong_message_is_rejected_and_session_is_unchanged(talk):
    session = talk(("key",))
    turn(session, "7 8")
    before = list(session.messages)
    for count in (LENGTH, LENGTH - 10):
        with pytest.raises(GenerationError, match=f"the cache length is {LENGTH}"):
            session._answer(" ".join("1" * count))
    assert session.messages == before
    wanted = prompt(session, "9")
    assert turn(session, "9") == known_tokens(wanted, 3, ("key",))


def test_interrupted_response_is_part_of_session(talk, monkeypatch):
    session, heard = talk(("key",), count=30), []

    def cancel_third(text: str) -> None:
        heard.append(text)
        if len(heard) == 3:
            session.last.cancel()

    with monkeypatch.context() as patch:
        patch.setattr("partita.commands.chat.write_stdout", cancel_third)
        assert session._answer("7 8") == INTERRUPTED
    wanted = prompt(session, "9")
    tokens = turn(session, "9")
    assert session.last.prefilled_tokens <= 6, "the cache is good"
    assert tokens == known_tokens(wanted, len(tokens), ("key",)) and tokens


def test_message_without_response_is_removed(talk, monkeypatch):
    @contextmanager
    def cancelled(ticket: Any) -> Iterator[None]:
        ticket.cancel()
        yield

    monkeypatch.setattr("partita.commands.chat.ctrl_c_ends", cancelled)
    session = talk(("key",))
    assert turn(session, "7 8") == []
    assert session.messages == [{"role": "system", "content": SYSTEM}]


def test_ctrl_c_before_row_assignment_allows_next_turn(talk, monkeypatch):
    session = talk(("key",))
    join = GenerationLoop.add_request

    def pressed(*_: Any) -> int:
        monkeypatch.setattr(GenerationLoop, "add_request", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerationLoop, "add_request", pressed)
    with pytest.raises(KeyboardInterrupt):
        session._answer("7 8")
    assert [message["role"] for message in session.messages] == ["system"]
    wanted = prompt(session, "9")
    assert turn(session, "9") == known_tokens(wanted, 3, ("key",))


def test_turns_have_seeds_from_the_given_one(talk):
    session = talk(("key",))
    session.options = replace(session.options, temperature=1.0, seed=2**40 + 5, max_new_tokens=2)
    for number in range(2):
        turn(session, "7")
        assert session.last.work.sampling.seed == 2**40 + 5 + number
