"""A process that is asked one thing at a time: its answers, and every way in which it can fail to give one."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from partita.runtime.process.live_child import ChildLostError, LiveChild

HEAD = "import json, os, signal, sys, time\nfor line in sys.stdin:\n    question = json.loads(line)\n"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start a child whose loop has this body; it is ended with the test."""
    started: list[LiveChild] = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(body: str) -> LiveChild:
        (tmp_path / "talks.py").write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
        started.append(LiveChild("talks", tmp_path / f"child-{len(started)}"))
        return started[-1]

    yield start
    for entry in started:
        entry.kill()


def test_it_answers_as_often_as_it_is_asked(child):
    adds = child("print(json.dumps({'sum': sum(question['numbers'])}), flush=True)")
    assert adds.ask({"numbers": [1, 2]}, 30) == {"sum": 3}
    assert adds.ask({"numbers": [3, 4]}, 30) == {"sum": 7}
    adds.close()
    assert adds.process.returncode == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('so it goes', file=sys.stderr); os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("print('so', file=sys.stderr); sys.stderr.flush(); os._exit(7)", "ended with exit code 7; last line: so"),
        ("print('hello', flush=True)", "sent an unexpected response: 'hello'"),
        ("print('[1]', flush=True)", "sent an unexpected response"),
        ("time.sleep(60)", "gave no answer within 2 s"),
    ],
)
def test_what_is_no_answer_is_a_finding_and_ends_it(child, body, words):
    lost = child(body)
    with pytest.raises(ChildLostError, match=words):
        lost.ask({}, 2 if "sleep" in body else 30)
    assert lost.process.returncode is not None
    with pytest.raises(ChildLostError):
        lost.ask({}, 30)


def test_it_is_ended_with_what_it_started(child):
    parent = child(
        """
        import subprocess
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(json.dumps({"pid": other.pid}), flush=True)
        time.sleep(60)
        """
    )
    pid = parent.ask({}, 30)["pid"]
    parent.kill()
    gone = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < gone:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_its_temporary_files_are_where_the_caller_removes_them(child):
    tells = child("import tempfile; print(json.dumps({'at': tempfile.gettempdir()}), flush=True)")
    assert tells.ask({}, 30)["at"] == os.fspath(tells.log.parent)
