"""Journal of a batch run: no row is lost or duplicated, however the writing process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from partita.errors import ResourceError, UsageError
from partita.library.batches.journal import Journal, journal_path
from partita.library.batches.rows import AnswerRow
from tests.conftest import REPOSITORY

RUN: dict[str, Any] = {"input file": "a", "temperature": 0.0, "stop": ("x",)}
ROWS = 4


def answer(index: int, text: str = "é\n") -> AnswerRow:
    return AnswerRow(index, f"row-{index}", text, (1, 2), 3, "length", None, None)


def lines(file: IO[bytes], written: Iterator[bytes]) -> None:
    file.writelines(written)


def begun(out: Path, count: int = ROWS) -> bytes:
    """A journal with the answers to the first rows; its content."""
    with Journal(out, RUN, 5, ROWS) as journal:
        for index in range(count):
            journal.append(answer(index))
    return journal_path(out).read_bytes()


def in_child(program: str, out: Path) -> subprocess.CompletedProcess[str]:
    imports = "import sys; from pathlib import Path; from partita.library.batches.journal import *"
    return subprocess.run(
        [sys.executable, "-c", f"{imports}\n{program}", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_rows_are_published_in_input_order(out):
    with Journal(out, RUN, 5, ROWS) as journal:
        for index in (2, 0, 1):
            journal.append(answer(index))
        journal.append(answer(1, "a second answer"))
    with Journal(out, RUN, 99, ROWS) as journal:
        assert (journal.resumed, journal.seed, journal.missing()) == (3, 5, [3]), "the seed is the run's"
        journal.append(answer(3))
        journal.publish(lines)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["index"], row["text"]) for row in found] == [(index, "é\n") for index in range(ROWS)]
    assert [*out.parent.iterdir()] == [out]


def test_truncated_journal_resumes_from_complete_lines(out):
    whole = begun(out)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        journal_path(out).write_bytes(whole[:size])
        with Journal(out, RUN, 5, ROWS) as journal:
            assert journal.resumed == max(sum(end <= size for end in ends) - 1, 0)
            for index in journal.missing():
                journal.append(answer(index))
        assert journal_path(out).read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.5, "stop": ("y",)}, "with another `temperature` and `stop`; finish that run"),
        ({"package files": "b"}, "with another package"),
    ],
)
def test_journal_of_different_run_is_unchanged_and_difference_named(out, change, said):
    before = begun(out)
    with pytest.raises(UsageError, match=said):
        Journal(out, {**RUN, **change}, 5, ROWS)
    assert journal_path(out).read_bytes() == before


@pytest.mark.parametrize("content", [b'{"prompt": "my own file"}\n', b"my own file", b'{"prompt": 1}'])
def test_non_journal_file_is_rejected_unchanged(out, content):
    journal_path(out).write_bytes(content)
    with pytest.raises(UsageError, match="not a journal of Partita"):
        Journal(out, RUN, 5, ROWS)
    assert journal_path(out).read_bytes() == content
    journal_path(out).unlink()
    journal_path(out).mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        Journal(out, RUN, 5, ROWS)


def test_empty_journal_is_reused_and_removed_after_failed_run(out):
    begun(out, 0)
    with Journal(out, {**RUN, "package files": "b"}, 7, ROWS) as journal:
        assert (journal.seed, journal.resumed) == (7, 0)
    with pytest.raises(ValueError, match="own"), Journal(out, RUN, 5, ROWS):
        raise ValueError("own")
    assert not journal_path(out).exists()


def test_concurrent_process_cannot_open_same_output(out):
    with Journal(out, {}, 1, 1):
        other = in_child("Journal(Path(sys.argv[1]), {}, 1, 1)", out)
    assert other.returncode and "another process writes this output" in other.stderr


FILLS = """
import resource
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
with Journal(Path(sys.argv[1]), {}, 1, 100) as journal:
    try:
        for index in range(100):
            journal.append(AnswerRow(index, None, "x" * index, (1,), 1, "stop", None, None))
    except ResourceError as error:
        print(len(journal), error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_full_disk_preserves_rows_and_next_run_resumes(out):
    done = in_child(FILLS, out)
    count = int(done.stdout.split()[0])
    assert count and "cannot be written" in done.stdout and "run the same command again" in done.stdout
    assert journal_path(out).read_bytes().endswith(b"}\n")
    with Journal(out, {}, 1, 100) as journal:
        assert journal.resumed == count


@pytest.mark.parametrize(
    "line", [answer(4).to_line(), answer(-1).to_line(), b"[" * 100_000, b"\0\0\0"], ids=lambda line: repr(line[:24])
)
def test_damaged_line_is_ignored_and_its_row_rerun(out, line):
    *before, last = begun(out).splitlines(keepends=True)
    journal_path(out).write_bytes(b"".join(before[:-1]) + line.strip(b"\n") + b"\n" + last)
    with Journal(out, RUN, 5, ROWS) as journal:
        assert journal.missing() == [2]
        journal.append(answer(2))
        journal.publish(lines)
    assert out.read_bytes() == b"".join(answer(index).to_line() for index in range(ROWS))


@pytest.mark.parametrize(("run", "seed"), [("7", "1"), ("{}", "1e999")])
def test_damaged_header_raises_usage_error(out, run, seed):
    header = f'{{"schema": "partita.batch/1", "run": {run}, "seed": {seed}}}\n'
    journal_path(out).write_bytes(header.encode() + answer(0).to_line())
    with pytest.raises(UsageError, match="first line is damaged"):
        Journal(out, {}, 1, 1)


def test_run_killed_after_writing_output_is_finished_by_next_run(out, monkeypatch):
    with monkeypatch.context() as patched, Journal(out, RUN, 5, ROWS) as journal:
        patched.setattr(Journal, "_remove", lambda self: None)
        for index in range(ROWS):
            journal.append(answer(index))
        journal.publish(lines)
    made = out.read_bytes()
    assert journal_path(out).exists()
    with Journal(out, RUN, 5, ROWS) as journal:
        assert not journal.missing()
        journal.publish(lines)
    assert out.read_bytes() == made and [*out.parent.iterdir()] == [out]


def test_output_file_not_written_by_this_run_is_not_overwritten(out):
    begun(out)
    with Journal(out, RUN, 5, ROWS) as journal, pytest.raises(UsageError, match="was written by another program"):
        journal.publish(lambda file, written: out.write_bytes(b"theirs"))
    assert out.read_bytes() == b"theirs" and sorted(out.parent.iterdir()) == [out, journal_path(out)]


def test_journal_truncated_before_publish_raises_resource_error(out):
    with Journal(out, RUN, 1, 1) as journal:
        journal.append(answer(0))
        os.truncate(journal_path(out), journal_path(out).stat().st_size - 3)
        with pytest.raises(ResourceError, match="lost the answer to row 0"):
            journal.publish(lines)
    assert not out.exists()


def test_missing_folder_is_an_error_and_relative_path_survives_chdir(tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match="cannot be written"):
        Journal(tmp_path / "nowhere" / "out.jsonl", RUN, 1, 1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Journal(Path("out.jsonl"), RUN, 1, 1) as journal:
        monkeypatch.chdir(tmp_path / "other")
        journal.append(answer(0))
        journal.publish(lines)
    assert (tmp_path / "out.jsonl").is_file()


def test_symlinked_output_and_long_file_names_are_supported(tmp_path):
    link, target = tmp_path / "link.jsonl", tmp_path / f"{'a' * 241}.jsonl"
    link.symlink_to(target)
    for output in (link, tmp_path / f"{'b' * 241}.jsonl"):
        with Journal(output, RUN, 1, 1) as journal:
            journal.append(answer(0))
            journal.publish(lines)
    assert link.is_symlink() and target.read_bytes() == answer(0).to_line()
