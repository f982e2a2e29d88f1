"""The journal of a run: what is in it is never lost nor there twice, however the process that wrote it ended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from partita.errors import ResourceError, UsageError
from partita.library.batches import journal as journal_module
from partita.library.batches.journal import Journal, journal_path
from partita.library.batches.rows import RowAnswer
from partita.library.batches.writing import write_answers
from tests.conftest import REPOSITORY

RUN = {"input file": {"sha256": "a"}, "options": {"temperature": 0.0, "stop": ("x",)}}


def answer(index: int, text: str = "é\n") -> RowAnswer:
    return RowAnswer(index, f"row-{index}", text, (1, 2), 3, "length", None, None)


def lines(journal: Journal) -> list[dict[str, object]]:
    return [json.loads(line) for line in journal.answers()]


def test_answers_come_out_in_the_order_of_the_rows(tmp_path):
    path = tmp_path / "out.jsonl.partial"
    with Journal(path, RUN, 5) as journal:
        for index in (2, 0, 1):
            journal.append(answer(index))
        assert [line["index"] for line in lines(journal)] == [0, 1, 2] and journal.tokens == 6
        with pytest.raises(ValueError, match="already"):
            journal.append(answer(1))
    with Journal(path, RUN, 99) as journal:
        assert (journal.resumed, journal.seed, len(journal)) == (3, 5, 3), "the seed is that of the run"
        assert all(index in journal for index in range(3)) and 3 not in journal
        journal.append(answer(4))
        with pytest.raises(UsageError, match="row 3 has no answer"):
            lines(journal)
        journal.remove()
    assert not path.exists()


def test_a_journal_that_was_cut_off_anywhere_goes_on_with_what_is_whole(tmp_path):
    path = tmp_path / "whole"
    with Journal(path, RUN, 5) as journal:
        for index in range(3):
            journal.append(answer(index))
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Journal(path, RUN, 5) as journal:
            assert journal.resumed == max(sum(end <= size for end in ends) - 1, 0)
            for index in range(3):
                if index not in journal:
                    journal.append(answer(index))
        assert path.read_bytes() == whole


def test_the_journal_of_another_run_stays_as_it_is_and_says_what_differs(tmp_path):
    path = tmp_path / "out.jsonl.partial"
    with Journal(path, RUN, 5) as journal:
        journal.append(answer(0))
    before = path.read_bytes()
    others = {
        "temperature was 0.0 and is 0.5": {**RUN, "options": {"temperature": 0.5, "stop": ("x",)}},
        "the package is another": {**RUN, "package": "b"},
        "sha256": {**RUN, "input file": {"sha256": "c"}},
    }
    for said, run in others.items():
        with pytest.raises(UsageError, match=said):
            Journal(path, run, 5)
        assert path.read_bytes() == before
    for foreign in (b'{"prompt": "my own file"}\n', b"my own file", b'{"prompt": 1}'):
        path.write_bytes(foreign)
        with pytest.raises(UsageError, match="not written by Partita"):
            Journal(path, RUN, 5)
        assert path.read_bytes() == foreign


def test_a_journal_without_an_answer_is_of_no_run_and_one_that_failed_leaves_none(tmp_path):
    path = tmp_path / "out.jsonl.partial"
    Journal(path, RUN, 5).close()
    before = path.read_bytes()
    for left in (before, before + b'{"index": 0, "fini'):
        path.write_bytes(left)
        with Journal(path, {**RUN, "package": "b"}, 7) as journal:
            assert (journal.seed, journal.resumed) == (7, 0)
            journal.append(answer(0))
        with pytest.raises(UsageError, match="the package is another"):
            Journal(path, RUN, 5)
        path.unlink()
    with pytest.raises(ValueError, match="own"), Journal(path, RUN, 5):
        raise ValueError("own")
    assert not path.exists()
    with pytest.raises(ValueError, match="own"), Journal(path, RUN, 5) as journal:
        journal.append(answer(0))
        raise ValueError("own")
    assert path.exists()


def test_two_processes_do_not_write_one_journal(tmp_path):
    path = journal_path(tmp_path / "out.jsonl")
    program = "import sys, partita.library.batches.journal as j; j.Journal(j.Path(sys.argv[1]), {}, 1)"
    with Journal(path, {}, 1):
        other = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
    assert other.returncode and "another process is at work on this output" in other.stderr


FILLS = """
import resource, signal, sys
from pathlib import Path
from partita.errors import ResourceError
from partita.library.batches.journal import Journal
from partita.library.batches.rows import RowAnswer
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
with Journal(Path(sys.argv[1]), {}, 1) as journal:
    try:
        for index in range(100):
            journal.append(RowAnswer(index, None, "x" * index, (1,), 1, "stop", None, None))
    except ResourceError as error:
        print(len(journal), error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_full_disk_keeps_the_answers_so_far_and_the_next_run_goes_on(tmp_path: Path):
    path = tmp_path / "out.jsonl.partial"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", FILLS, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    count = int(done.stdout.split()[0])
    assert count and "cannot be written" in done.stdout and "the same command goes on" in done.stdout
    assert path.read_bytes().endswith(b"}\n"), "no line is cut off"
    with Journal(path, {}, 1) as journal:
        assert journal.resumed == count


def test_a_journal_that_cannot_be_written_is_an_error_in_a_line(tmp_path):
    with pytest.raises(ResourceError, match="cannot be written"):
        Journal(tmp_path / "nowhere" / "out.jsonl.partial", RUN, 1)


def test_a_journal_goes_while_it_is_locked(tmp_path: Path, monkeypatch):
    path, seen = tmp_path / "journal", list[bool]()
    with Journal(path, {}, 0) as journal:
        close = journal.close

        def closing() -> None:
            seen.append(path.exists())
            close()

        monkeypatch.setattr(journal, "close", closing)
        journal.remove()
    assert seen[0] is False and not path.exists()


def test_what_a_killed_command_left_beside_the_output_goes(tmp_path: Path):
    out = tmp_path / "out.jsonl"

    def killed():
        yield b"{}\n"
        kept.extend(path.name for path in tmp_path.iterdir())
        yield b"{}\n"

    kept: list[str] = []
    write_answers(out, killed())
    (tmp_path / kept[0]).write_bytes(b"half")
    out.unlink()
    write_answers(out, iter([b"{}\n"]))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"] and out.read_bytes() == b"{}\n"


def test_answers_that_are_there_by_now_are_left_as_they_are(tmp_path: Path, monkeypatch):
    """Those of a run that ended while this one loaded its model, say; where there are no links, too."""
    out = tmp_path / "out.jsonl"

    def written_meanwhile():
        yield b"{}\n"
        out.write_bytes(b"theirs")

    for links in (True, False):
        out.unlink(missing_ok=True)
        if not links:
            monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
        with pytest.raises(UsageError, match="was written while the rows were answered"):
            write_answers(out, written_meanwhile())
        assert out.read_bytes() == b"theirs" and [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
        out.unlink()
        write_answers(out, iter([b"{}\n"]))
        assert out.read_bytes() == b"{}\n"


def test_a_name_as_long_as_the_file_system_allows_has_its_answers(tmp_path: Path):
    out = tmp_path / f"{'a' * 241}.jsonl"
    with Journal(journal_path(out), RUN, 1) as journal:
        journal.append(answer(0))
        write_answers(out, journal.answers())
    assert out.is_file()


def test_whoever_hears_of_steps_may_go_to_another_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Journal(Path("journal"), RUN, 1) as journal:
        journal.append(answer(0))
        monkeypatch.chdir(tmp_path / "other")
        assert [line["index"] for line in lines(journal)] == [0]
        journal.remove()
    assert not (tmp_path / "journal").exists()


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks available\); give an --output on a file system"):
        Journal(tmp_path / "journal", RUN, 1)


@pytest.mark.parametrize(("code", "told"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)])
def test_a_disk_that_says_late_that_it_is_full_is_heard(tmp_path: Path, monkeypatch, code, told):
    with Journal(tmp_path / "journal", RUN, 1) as journal:
        journal.append(answer(0))
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(code, "late")))
        if told:
            with pytest.raises(ResourceError, match="late"):
                journal.sync()
        else:
            journal.sync()


def test_an_answer_that_was_lost_on_disk_is_not_passed_on(tmp_path: Path):
    path = tmp_path / "journal"
    with Journal(path, RUN, 1) as journal:
        journal.append(answer(0))
        os.truncate(path, path.stat().st_size - 3)
        with pytest.raises(ResourceError, match="lost the answer to row 0"):
            write_answers(tmp_path / "out.jsonl", journal.answers())
    assert not (tmp_path / "out.jsonl").exists()


BAD_LINES = {
    "beyond the rows": b'"index": 3,',
    "far beyond": b'"index": 1000000000000,',
    "negative": b'"index": -1,',
    "infinite": b'"index": Infinity,',
    "a fraction": b'"index": 2.0,',
    "a truth value": b'"index": true,',
    "hundreds of digits": b'"index": 1' + b"0" * 400 + b",",
    "an object for text": b'"index": 2, "text": {"a": 1},',
    "text for tokens": b'"index": 2, "tokens": "12",',
    "a token that is none": b'"index": 2, "tokens": [1, "2"],',
    "an object for the id": b'"index": 2, "id": {},',
    "nested deeply": b'"index": 2, "error": ' + b"[" * 100_000 + b"]" * 100_000 + b",",
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_line_that_is_no_answer_to_a_row_is_told_of_and_its_row_is_answered_again(tmp_path: Path, kind: str):
    path = tmp_path / "journal"
    with Journal(path, RUN, 1, rows=3) as journal:
        for index in range(2):
            journal.append(answer(index))
        line = json.dumps(answer(2).to_json()).encode() + b"\n"
    field = BAD_LINES[kind].split(b":")[1].split(b'"')[-2] if b"2, " in BAD_LINES[kind] else b"index"
    said = json.loads(line)
    others = {name: value for name, value in said.items() if name.encode() not in (b"index", field)}
    path.write_bytes(path.read_bytes() + b"{" + BAD_LINES[kind] + json.dumps(others).encode()[1:] + b"\n")
    with Journal(path, RUN, 1, rows=3) as journal:
        assert len(journal) == 2 and 2 not in journal and "line 4 is damaged" in journal.damage
        journal.append(answer(2))
        assert [each["index"] for each in lines(journal)] == [0, 1, 2]
    with Journal(path, RUN, 1, rows=3) as journal:
        assert len(journal) == 3 and not journal.damage


def test_a_first_line_of_another_form_is_damage_in_a_line(tmp_path: Path):
    path = tmp_path / "journal"
    for run, seed in (("[]", "1"), ("{}", '"x"'), ("{}", "1e999"), ("{}", "9" * 400), ("{}", "null")):
        path.write_text(f'{{"schema": "{journal_module.SCHEMA}", "run": {run}, "seed": {seed}}}\n{{"index": 0}}\n')
        with pytest.raises(UsageError, match="damaged in its first line"):
            Journal(path, {}, 1)


@pytest.mark.parametrize("gone", ["journal", "folder", "replaced"])
def test_a_journal_that_was_removed_keeps_no_answers_and_says_so(tmp_path: Path, gone: str):
    path = tmp_path / "run" / "out.jsonl.partial"
    path.parent.mkdir()
    with Journal(path, RUN, 1) as journal:
        journal.append(answer(0))
        assert "1 of 2 rows answered in" in journal_module.kept_words(path, 1, 2)
        path.unlink()
        if gone == "folder":
            path.parent.rmdir()
        elif gone == "replaced":
            path.write_bytes(b"")
        with pytest.raises(ResourceError, match="removed or replaced while rows were answered, and their answers"):
            journal.sync()
    if gone != "replaced":
        assert "kept" not in journal_module.kept_words(path, 1, 2)


def test_a_link_and_what_it_leads_to_are_written_apart(tmp_path: Path):
    """Two runs, two journals: neither has the half-written file of the other."""
    link, out = tmp_path / "link.jsonl", tmp_path / "out.jsonl"
    link.symlink_to(out)

    def meanwhile():
        yield b"first\n"
        write_answers(out, iter([b"second\n"]))

    with pytest.raises(UsageError, match="was written while"):
        write_answers(link, meanwhile())
    assert out.read_bytes() == b"second\n" and len([*tmp_path.iterdir()]) == 2


def test_a_journal_that_is_a_link_to_nowhere_is_an_error_in_a_line(tmp_path: Path):
    (tmp_path / "journal").symlink_to(tmp_path / "gone" / "journal")
    with pytest.raises(ResourceError, match="cannot be written"):
        Journal(tmp_path / "journal", RUN, 1)


def test_a_run_that_was_killed_at_its_very_end_changes_no_answers_afterwards(tmp_path: Path):
    """Its temporary file has a second name, that of answers which somebody has moved since."""
    out, kept = tmp_path / "out.jsonl", tmp_path / "kept.jsonl"
    names: list[str] = []

    def seen():
        names.extend(path.name for path in tmp_path.iterdir())
        yield b"first\n"

    write_answers(out, seen())
    os.link(out, tmp_path / names[0])
    out.rename(kept)
    write_answers(out, iter([b"second\n"]))
    assert kept.read_bytes() == b"first\n" and out.read_bytes() == b"second\n"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_journal_that_would_be_no_file_is_refused(tmp_path: Path, kind: str):
    """A pipe in its place was read from until somebody wrote to it."""
    path = tmp_path / "journal"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(UsageError, match="no regular file"):
        Journal(path, RUN, 1)
