"""A child with children of its own: Ctrl-C is its own to handle, and nothing is left of it."""

from __future__ import annotations

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
