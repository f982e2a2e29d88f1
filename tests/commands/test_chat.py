"""`partita chat` over a pipe and at a terminal, with key bindings and Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.cli import run
from partita.commands.chat import TypedLines, ctrl_c_ends, read_conversation
from partita.errors import UsageError
from tests.commands.test_cli import child_environment
from tests.conftest import Exported, TinyCheckpoint

SYSTEM = "return the item"
SLOW = """
import time
import partita.runtime.generate.choice.sampling as sampling
def greedy(logits, history):
    time.sleep(0.02)
    return 100 + len(history) % 50
sampling.greedy = greedy
from partita.cli import main
main()
"""
"""Answers go on for two seconds, so that there is time to end one."""
READY = r">.*\x1b\[\?25h"
"""The prompt, and then the cursor is shown."""


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama", max_position_embeddings=2048), attention="gqa", max_length=2048)


def piped(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return run(["chat", *arguments, "--provider", "cpu", "--threads", "1"])


def answers(package: Path, *messages: str, count: int = 6) -> list[str]:
    """What the library answers when it is given the whole conversation each time."""
    said: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        for message in messages:
            said.append({"role": "user", "content": message})
            said.append({"role": "assistant", "content": model.chat(said, max_new_tokens=count).run().text})
    return [entry["content"] for entry in said if entry["role"] == "assistant"]


def test_each_stdin_line_is_a_message(package, monkeypatch, capsys, tmp_path):
    kept = tmp_path / "said.json"
    text = f"the value\n\nof the\\\nother list\n/save {kept}\n//in\n"
    assert piped(monkeypatch, text, str(package), "--system", SYSTEM, "-n", "6") == 0
    wanted = answers(package, "the value", "of the\nother list", "/in")
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in wanted)
    assert f"conversation: {kept} (5 messages)" in err
    assert [entry["content"] for entry in json.loads(kept.read_text())["messages"]] == [
        SYSTEM,
        "the value",
        wanted[0],
        "of the\nother list",
        wanted[1],
    ]
    for guessing in ((), ("--speculate", "ngram"), ("--draft", str(package))):
        assert piped(monkeypatch, "//in\n", str(package), "--resume", str(kept), "-n", "6", *guessing) == 0
        assert capsys.readouterr().out == f"{wanted[2]}\n"


def test_missing_chat_template_suggests_generate(package, own_copy, monkeypatch, capsys):
    bare = own_copy(package)
    (bare / "chat_template.jinja").unlink()
    assert piped(monkeypatch, "hi\n", str(bare)) == 2
    err = capsys.readouterr().err
    assert "no chat template" in err and f"partita generate {bare} PROMPT" in err


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "x", "messages": []}', '{"messages": [{"role": "me"}]}'])
def test_resume_rejects_files_without_conversation(tmp_path, text):
    file = tmp_path / "said.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="not a conversation"):
        read_conversation(file)


def test_prompt_key_bindings_and_history(own_cache):
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys:
        lines = TypedLines(("/help",), keys, DummyOutput())
        for typed, wanted in (
            ("hello\r", "hello"),
            ("one\\\rtwo\r", "one\ntwo"),
            ("one\x1b\rtwo\r", "one\ntwo"),
            ("dropped\x03kept\r", "kept"),
            ("\x1b[A\x1b[A\x1b[A\r", "one\ntwo"),
            ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
            ("\x12kep\r\r", "kept"),  # found by a search, taken by the first Enter and sent by the second
            ("\x12past\r\r", "pasted\nlines"),
            ("\x04", None),
        ):
            keys.send_text(typed)
            assert lines.read() == wanted, typed
        assert "one" in (own_cache / "chat" / "history").read_text()
        assert (own_cache / "chat" / "history").stat().st_mode & 0o077 == 0
        later = TypedLines((), keys, DummyOutput())
        keys.send_text("\x1b[A\r")
        assert later.read() == "pasted\nlines", "history is there in the next session"


def test_ctrl_c_cancels_reply_and_second_press_interrupts(monkeypatch):
    class Asked:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    now = [100.0]
    monkeypatch.setattr("partita.commands.chat.time.monotonic", lambda: now[0])
    ticket, before = Asked(), signal.default_int_handler
    found = signal.signal(signal.SIGINT, before)  # who runs tests in the background may have it ignored
    with ctrl_c_ends(ticket):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)
        now[0] += 0.1
        signal.raise_signal(signal.SIGINT)  # the same press, passed on by another process
        assert ticket.cancelled
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, found)


def test_terminal_session_handles_ctrl_c_and_commands(package, tmp_path, own_cache):
    pexpect = pytest.importorskip("pexpect")
    report, kept = tmp_path / "report.json", tmp_path / "said.json"
    command = [sys.executable, "-c", SLOW, "chat", str(package), "--provider", "cpu", "--threads", "1", "-n", "100"]
    environment = {
        **child_environment(),
        "PARTITA_CACHE_DIR": str(own_cache),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    session = pexpect.spawn(
        command[0],
        command[1:],
        env=environment,
        timeout=120,
        encoding="utf-8",
        codec_errors="replace",
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        dimensions=(40, 120),
    )
    session.expect("Ctrl-D ends the session")
    session.expect(READY)
    ends = [r"interrupted by Ctrl-C\]", "interrupted; the next reply", r"cache: \d+ of \d+ tokens\]", pexpect.TIMEOUT]
    for seconds in (0.3, 0.1, 0.05, 0.2, 0.02, 0.5):  # too early it finds the prompt, and too late no answer
        session.send("/reset\r")
        session.expect("started a new conversation")
        session.expect(READY)
        session.send("the value\r")
        session.expect(r"\x1b\[\?2004l")
        time.sleep(seconds)
        session.sendintr()
        if session.expect(ends, timeout=8) < 2:
            break
        session.expect([READY, pexpect.TIMEOUT], timeout=2)
    else:
        raise AssertionError("no answer was ended")
    session.expect(READY)
    session.send(f"/save {kept}\r")
    session.expect(r"conversation: .*\(\d messages\)")
    session.send("/nothing\r")
    session.expect("/nothing is not a command")
    session.send("/reset\r")
    session.expect("started a new conversation")
    session.send("of\r")
    session.expect(r"\[(\d+) tokens prefilled")
    assert int(session.match[1]) < 60
    session.expect(READY)
    session.send(f"/report {report}\r")
    session.expect("report: ")
    session.expect(READY)
    session.send("\x04")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 0
    assert json.loads(kept.read_text())["schema"] == "partita.chat/1"
    assert re.search('"schema": ?"partita.report/1"', report.read_text())
