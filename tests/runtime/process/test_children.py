"""A child with children of its own: Ctrl-C is its own to handle, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from partita.runtime.process.children import run_patiently
from tests.runtime.test_provider_check import assert_gone

CHILD = "tests.runtime.patient_child"


def press_ctrl_c(monkeypatch, pids, times):
    """Press it `times` times, one after the other, once both processes run."""
    left = [times]
    sleep = time.sleep

    def interrupted(seconds):
        sleep(seconds)
        if left[0] and pids.is_file() and len(pids.read_text().split()) == 2:
            left[0] -= 1
            raise KeyboardInterrupt

    monkeypatch.setattr("partita.runtime.process.children.time.sleep", interrupted)


def test_the_first_ctrl_c_is_the_childs_and_its_result_is_kept(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    press_ctrl_c(monkeypatch, pids, 1)
    outcome = run_patiently(CHILD, {"heeds": True, "pids": str(pids)}, timeout_seconds=60)
    assert outcome.result == {"interrupted": True}
    for pid in pids.read_text().split():
        assert_gone(int(pid))


def test_the_second_ctrl_c_ends_it_with_what_it_started(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    press_ctrl_c(monkeypatch, pids, 2)
    with pytest.raises(KeyboardInterrupt):
        run_patiently(CHILD, {"heeds": False, "pids": str(pids)}, timeout_seconds=60)
    for pid in pids.read_text().split():
        assert_gone(int(pid))


def test_a_child_that_hangs_ends_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    outcome = run_patiently(CHILD, {"heeds": False, "pids": str(pids)}, timeout_seconds=4)
    assert outcome.result is None and outcome.ended == "gave no answer within 4 s"
    for pid in pids.read_text().split():
        assert_gone(int(pid))


def kill_when_begun(parent, pids):
    """SIGKILL `parent` once `pids` names two processes, which have to end by themselves then."""
    deadline = time.monotonic() + 60
    while not (pids.is_file() and len(pids.read_text().split()) == 2):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    for pid in pids.read_text().split():
        assert_gone(int(pid))


@pytest.mark.skipif(sys.platform == "win32", reason="children are looked after on POSIX only")
def test_children_end_with_a_parent_that_was_killed(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "from partita.runtime.process.children import run_children\n"
        f"run_children({CHILD!r}, [dict(heeds=False, pids={str(pids)!r})], timeout_seconds=600)"
    )
    kill_when_begun(subprocess.Popen([sys.executable, "-c", code]), pids)


IN_A_FORK = """
import os, sys, time
from pathlib import Path
from partita.commands import supervise

def verb():
    Path(sys.argv[1]).write_text(f"{os.getppid()} {os.getpid()}")
    time.sleep(600)

supervise.worth_it = lambda target: True
supervise.supervised(verb, None)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_verb_in_a_fork_ends_with_the_command_that_was_killed(tmp_path):
    pids = tmp_path / "pids"
    kill_when_begun(subprocess.Popen([sys.executable, "-c", IN_A_FORK, str(pids)]), pids)
