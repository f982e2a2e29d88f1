"""A file of prompts to a file of answers: which run it is, and what its seconds are of. Nothing is computed here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.errors import GenerationError, UsageError
from partita.library.batches import filing
from partita.library.batches.filing import identity
from partita.library.batches.journal import Journal, journal_path
from partita.library.batches.reading import InputFile, look_at
from partita.library.batches.rows import InputRow, RowAnswer, RowDefaults
from partita.library.cluster import filing as cluster_filing
from partita.library.sampling import Sampling

LOOKING, READING, WRITING = 1000.0, 10.0, 1.0
"""Seconds of each."""
DEFAULTS = RowDefaults(Sampling(temperature=0.0, max_new_tokens=1))


def answer(index: int) -> RowAnswer:
    return RowAnswer(index, None, None, (1,), 1, "stop", None, None)


class Clock:
    """In place of `time`: what takes time here says how much."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def after(self, seconds: float, act: Any) -> Any:
        """What takes so long."""

        def timed(*given: Any) -> Any:
            self.now += seconds
            return act(*given)

        return timed


class Run:
    """In place of a run: answers each row at once."""

    unread: frozenset[str] = frozenset()
    prompt_tokens = tokens = 3

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def go(self, rows: Iterable[InputRow]) -> None:
        for row in rows:
            if row.index not in self.journal:
                self.journal.append(answer(row.index))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    return path


def timed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the looking, the reading and the writing of a module take their time."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    reads = "read_rows" if module is filing else "rows_of"
    for name, seconds in (("look_at", LOOKING), (reads, READING), ("write_answers", WRITING)):
        monkeypatch.setattr(module, name, clock.after(seconds, getattr(module, name)))
    if module is filing:
        monkeypatch.setattr(module, "contents_hash", clock.after(LOOKING, lambda *_: "hash"))


def test_seconds_are_those_of_the_rows_and_not_of_looking_at_files(source: Path, tmp_path: Path, monkeypatch) -> None:
    """The weights of a folder of another exporter are all read for their hash."""
    timed(filing, monkeypatch)
    monkeypatch.setattr(filing, "BatchRun", lambda scheduler, text, defaults, journal, heard: Run(journal))
    given: Any = None
    out = tmp_path / "out.jsonl"
    source = source.rename(source.with_suffix(".jsonl"))  # texts need a tokenizer
    done = filing.answer_file(
        source, out, lambda: given, tmp_path, given, None, DEFAULTS, options={}, heard=lambda run, looked: None
    )
    assert (done.rows, done.seconds) == (2, READING + LOOKING + WRITING), (
        "a look whether the file is the same as before"
    )
    assert [json.loads(line)["index"] for line in out.read_text(encoding="utf-8").splitlines()] == [0, 1]


def test_seconds_of_a_cluster_are_those_of_the_rows_too(source: Path, tmp_path: Path, monkeypatch) -> None:
    timed(cluster_filing, monkeypatch)
    monkeypatch.setattr(cluster_filing, "ClusterRun", lambda options, setup, slots, journal, *_: Run(journal))
    monkeypatch.setattr(cluster_filing, "replace", lambda setup, **_: setup)
    setup: Any = SimpleNamespace(contents="hash", defaults=DEFAULTS)
    manifest: Any = SimpleNamespace(graph=SimpleNamespace(batch_size=1))
    given: Any = None
    done = cluster_filing.answer_file(
        source, tmp_path / "out.jsonl", given, setup, manifest, told={}, heard=lambda run, looked: None
    )
    assert (done.filed.rows, done.filed.seconds) == (2, READING + WRITING)


def answered(source: Path, out: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a file of token ids, by a run in place of one."""
    monkeypatch.setattr(filing, "BatchRun", lambda scheduler, text, defaults, journal, heard: run(journal))
    monkeypatch.setattr(filing, "contents_hash", lambda *_: "hash")
    given: Any = None
    return filing.answer_file(
        source, out, lambda: given, out.parent, given, None, DEFAULTS, options={}, heard=lambda run, looked: None
    )


def test_a_file_that_changes_while_its_rows_are_answered_makes_no_output(tmp_path: Path, monkeypatch) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"tokens": [1]}\n', encoding="utf-8")
    before = source.read_bytes()

    class Grows(Run):
        def go(self, rows: Iterable[InputRow]) -> None:
            with source.open("a", encoding="utf-8") as file:
                file.write('{"tok')
            super().go(rows)

    with pytest.raises(
        GenerationError, match=r"in\.jsonl: has changed while its rows were answered.*out\.jsonl\.partial"
    ):
        answered(source, out, Grows, monkeypatch)
    assert not out.exists()
    source.write_bytes(before)
    assert answered(source, out, Run, monkeypatch).rows == 1, "no answer to half a row was kept"


def test_rows_of_another_file_in_its_place_are_not_answered(tmp_path: Path, monkeypatch) -> None:
    """Else they would be taken for answers to the rows of before, once these are back."""
    source, out, seen = tmp_path / "in.jsonl", tmp_path / "out.jsonl", list[Any]()
    text = "".join(json.dumps({"tokens": [number] * 2000}) + "\n" for number in range(40))
    source.write_text(text, encoding="utf-8")

    class Changes(Run):
        def go(self, rows: Iterable[InputRow]) -> None:
            for row in rows:
                seen.append(row.data["tokens"][0])
                self.journal.append(answer(row.index))
                if row.index == 3:
                    source.touch()  # of itself no change
                if row.index == 5:
                    source.write_text(text.replace("3", "7"), encoding="utf-8")

    with pytest.raises(GenerationError, match="has changed"):
        answered(source, out, Changes, monkeypatch)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_run_that_was_killed_when_its_answers_were_written_is_finished_by_the_same_command(
    source: Path, tmp_path: Path, monkeypatch, name: str
) -> None:
    source, out = source.rename(source.with_suffix(".jsonl")), tmp_path / name
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", lambda self: None)
        filing.check_files(source, out)
        answered(source, out, Run, patched)
    assert out.is_file() and journal_path(out).is_file()
    made = out.read_bytes()
    filing.check_files(source, out)
    done = answered(source, out, Run, monkeypatch)
    assert (done.rows, done.resumed) == (2, 2) and out.read_bytes() == made and not journal_path(out).exists()


def test_answers_of_another_run_are_not_taken_for_those_that_a_journal_has(
    source: Path, tmp_path: Path, monkeypatch
) -> None:
    source, out = source.rename(source.with_suffix(".jsonl")), tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", lambda self: None)
        answered(source, out, Run, patched)
    theirs = out.read_bytes().replace(b'"stop"', b'"length"')
    out.write_bytes(theirs)
    with pytest.raises(UsageError, match="exists already"):
        answered(source, out, Run, monkeypatch)
    assert out.read_bytes() == theirs and journal_path(out).is_file()


def begun(looked: InputFile, journal: Path) -> None:
    with Journal(journal, identity(looked, "package", {}), 1) as file:
        file.append(answer(0))


def test_the_same_bytes_in_another_format_are_other_rows(source: Path, tmp_path: Path) -> None:
    """A file of objects that was answered as lines of text, say, and has its right name by now."""
    journal = journal_path(tmp_path / "out.jsonl")
    begun(look_at(source), journal)
    renamed = look_at(source.rename(source.with_suffix(".jsonl")))
    with pytest.raises(UsageError, match="format of the input file was 'txt' and is 'jsonl'"):
        Journal(journal, identity(renamed, "package", {}), 1)
    same = look_at(renamed.path.rename(source.with_suffix(".ndjson")))
    assert identity(same, "package", {}) == identity(renamed, "package", {})
