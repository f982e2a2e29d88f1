"""A run of `make bench-peers` that was stopped goes on with what is missing, of the same commit and machine."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.peers.plan import ENTRIES
from benchmarks.peers.race import Settings
from benchmarks.peers.records import Contender, Machine
from benchmarks.peers.stored_races import Part, Parts

GROUP = [entry for entry in ENTRIES if entry.bits == 32]
SETTINGS = Settings(prompts=(16, 128), new_tokens=64, rounds=5, threads=2, start_prompt=128, vocabulary=1000)
MACHINE = Machine(
    processor="one", cores=2, memory_bytes=1 << 30, system="Linux", python="3.11", threads=2, load_average=0.1,
    read_gbps=1.0, gemv_gbps=1.0, gemm_gflops=1.0, int8_gops=1.0, matrix_unit=False,
)  # fmt: skip
PART = Part(
    conditions={},
    date="2026-01-01 00:00 UTC",
    parameters=10,
    checkpoint_bytes=20,
    contenders=(Contender(name="partita fp32", peer="partita", form="fp32", bits=32),),
)


@pytest.fixture
def parts(tmp_path):
    return Parts(tmp_path / "parts", "abc1234", MACHINE)


def test_what_was_measured_is_taken_over(parts):
    parts.keep("tiny", GROUP, SETTINGS, PART)
    found = parts.of("tiny", GROUP, SETTINGS)
    assert found is not None and found.contenders == PART.contenders and found.date == PART.date


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda parts: (dataclasses.replace(parts, commit="def"), GROUP, SETTINGS), "another commit"),
        (lambda parts: (parts, GROUP[1:], SETTINGS), "another contenders"),
        (lambda parts: (parts, GROUP, dataclasses.replace(SETTINGS, rounds=6)), "another settings"),
        (
            lambda parts: (
                dataclasses.replace(parts, machine=MACHINE.model_copy(update={"processor": "two"})),
                GROUP,
                SETTINGS,
            ),
            "another machine",
        ),
    ],
)
def test_of_something_else_nothing_is_taken_over(parts, capsys, changed, said):
    parts.keep("tiny", GROUP, SETTINGS, PART)
    other, group, settings = changed(parts)
    assert other.of("tiny", group, settings) is None
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("commit", [None, "abc1234-dirty"])
def test_files_that_no_commit_tells_apart_are_not_kept(tmp_path, commit):
    parts = Parts(tmp_path / "parts", commit, MACHINE)
    parts.keep("tiny", GROUP, SETTINGS, PART)
    assert parts.of("tiny", GROUP, SETTINGS) is None


def test_a_file_that_was_cut_is_measured_anew(parts, capsys):
    parts.keep("tiny", GROUP, SETTINGS, PART)
    file = next(parts.folder.iterdir())
    file.write_text(file.read_text("utf-8")[:100], "utf-8")
    assert parts.of("tiny", GROUP, SETTINGS) is None
    assert "cannot be read" in capsys.readouterr().err


def test_a_whole_run_leaves_nothing_of_its_own_and_what_others_have_done(parts):
    parts.keep("other", GROUP, SETTINGS, PART)
    one = dataclasses.replace(parts, used=set())
    one.keep("tiny", GROUP, SETTINGS, PART)
    one.forget()
    assert parts.of("tiny", GROUP, SETTINGS) is None and parts.of("other", GROUP, SETTINGS) is not None
