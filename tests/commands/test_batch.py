"""`partita generate --input FILE --output FILE`: every row once, in order, also after an interrupted run."""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.partition_reports import storage
from tests.commands.test_cli import child_environment, heed
from tests.conftest import require
from tests.runtime.handmade_packages import ALL, handmade, known_tokens

SECONDS = 60.0
"""Longest wait for what takes a moment."""
COUNT = 150
ROWS: list[dict[str, Any]] = [
    {"id": f"row-{n}", "tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 20 + n % 20} for n in range(COUNT)
]


@pytest.fixture
def summing(tmp_path: Path) -> Path:
    """A package without a tokenizer, whose answers a few lines of numpy know."""
    return handmade(tmp_path / "package", batch=3)


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def words(package: Path, source: Path, out: Path, *more: object) -> list[str]:
    given = ["generate", package, "--input", source, "--output", out, "--token-ids", "-e", "cpu", "--threads", 1, *more]
    return [str(word) for word in given]


def started(arguments: list[str]) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-m", "partita", *arguments], child_environment()
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def test_parquet_input_produces_parquet_output(summing, tmp_path, capsys):
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{**row, "logprobs": 1 if n == 2 else None} for n, row in enumerate(ROWS[:9])])
    parquet.write_table(table, tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    assert run(words(summing, tmp_path / "in.parquet", out)) == 0, capsys.readouterr().err
    found = parquet.read_table(out).to_pylist()
    assert [row["id"] for row in found] == [row["id"] for row in ROWS[:9]]
    for row, asked in zip(found, ROWS, strict=False):
        assert row["tokens"] == known_tokens(asked["tokens"], asked["max_new_tokens"], ALL)
    assert [row["logprobs"] is not None for row in found].index(True) == 2


def lines_in(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def until_lines(process: subprocess.Popen[str], journal: Path, count: int) -> None:
    """Wait until so many lines are there; the process is stopped then, so that it is in the middle of it."""
    deadline = time.monotonic() + SECONDS
    while lines_in(journal) < count:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it was to be ended"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.heavy), signal.SIGINT],
    ids=lambda number: number.name,
)
def test_terminated_run_resumes_without_lost_or_duplicate_rows(summing, tmp_path, number):
    source, out = written(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.partial"
    done = 0
    for _ in range(2 if number == signal.SIGKILL else 1):
        process = started(words(summing, source, out))
        until_lines(process, journal, done + 12)
        process.send_signal(number)
        said = process.communicate(timeout=SECONDS)[1]
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
        assert not out.exists() and lines_in(journal) > done
        done = lines_in(journal)
        assert number != signal.SIGINT or "run the same command again to continue" in said
    kept = read_journal(journal)
    process = started(words(summing, source, out))
    said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 0, said
    assert f"{len(kept)} rows already answered by an earlier run" in said and not journal.exists()
    found = read(out)
    assert [row["id"] for row in found] == [row["id"] for row in ROWS]
    assert [row["index"] for row in found] == list(range(COUNT))
    assert all(found[row["index"]] == row for row in kept), "what was answered is not answered again"
    for row, asked in zip(found, ROWS, strict=True):
        assert row["tokens"] == known_tokens(asked["tokens"], asked["max_new_tokens"], ALL)


def read_journal(journal: Path) -> list[dict[str, Any]]:
    """Whole answers in a journal."""
    lines = journal.read_bytes().split(b"\n")[1:-1]
    return [json.loads(line) for line in lines]


def test_text_and_message_rows_match_single_generation(tiny_checkpoint, exported, tmp_path, capsys):
    package = exported(tiny_checkpoint("llama"), attention="gqa", batch_size=2)
    said = [{"role": "user", "content": "return the value"}]
    rows: list[Any] = [
        {"prompt": "return the", "id": 5},
        {"messages": said, "max_tokens": 4},
        {"prompt": ""},
        {"prompt": "return the", "temperature": 1.0},
        {"prompt": "return the", "temperature": 1.0},
    ]
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    common = ["-e", "cpu", "--threads", "1", "-n", "6", "--seed", "3"]
    paths = ["--input", str(source), "--output", str(out), "--report", str(tmp_path / "r.json")]
    assert run(["generate", str(package), *common, *paths, "--json"]) == 0
    told, found = json.loads(capsys.readouterr().out), read(out)
    assert (told["rows"], told["errors"], told["resumed"], told["slots"]) == (5, 1, 0, 2)
    assert told["new_tokens"] == sum(len(row["tokens"]) for row in found) and told["rows_per_second"] > 0
    assert [row["finish_reason"] for row in found].count("error") == 1 and "empty" in found[2]["error"]
    assert (found[0]["id"], found[3]["seed"], found[4]["seed"]) == (5, 6, 7)
    report = storage.read(tmp_path / "r.json")
    assert all(check.passed for check in report.checks) and report.phases[0].nodes
    for index, prompt in ((0, ["return the", "return the"]), (1, ["return the value"] * 2 + ["--chat"])):
        asked = [word for part in prompt for word in ((part,) if part.startswith("--") else ("-p", part))]
        limit = ["-n", str(len(found[index]["tokens"]))]
        assert run(["generate", str(package), *asked, *common[:4], *limit, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"][0]["text"] == found[index]["text"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": -1, "temperature": 1.0}, "field seed is -1; it must be from 0"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be between 1"),
        ({"seed": 1 << 70}, "seed is 1180591620717411303424; it must be from 0 to 2**64 - 1"),
        ({"adapter": "other"}, "has no adapter of this name; it has none"),
        ({"stop": ["x"]}, "field stop is text, but there is no tokenizer"),
    ],
    ids=str,
)
def test_row_error_names_the_field(summing, tmp_path, capsys, fields, said):
    source, out = written(tmp_path / "in.jsonl", [{"tokens": [5], **fields}]), tmp_path / "out.jsonl"
    assert run(words(summing, source, out)) == 0
    (row,) = read(out)
    assert said in row["error"] and "--" not in row["error"] and "1 row" in capsys.readouterr().err


@pytest.mark.usefixtures("no_bytecode")
def test_full_disk_on_publish_keeps_completed_rows(summing, tmp_path, capsys, monkeypatch):
    """RLIMIT_FSIZE stops the Parquet table, which is larger than the journal."""
    require("pyarrow")
    from pyarrow import parquet

    source, out = written(tmp_path / "in.jsonl", ROWS[:6]), tmp_path / "out.parquet"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert run(words(summing, source, out)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = " ".join(capsys.readouterr().err.split())
    assert "all rows are complete: free disk space and run the same command again" in said
    assert not any("tmp" in path.name for path in tmp_path.iterdir()) and not out.exists()
    monkeypatch.setattr("partita.library.engine.local.LocalEngine.submit", None)  # nothing is answered again
    assert run(words(summing, source, out)) == 0
    assert "6 rows already answered by an earlier run" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet.partial").exists()
    found = parquet.read_table(out).to_pylist()
    assert [row["tokens"] for row in found] == [known_tokens(r["tokens"], r["max_new_tokens"]) for r in ROWS[:6]]


def piped(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Any]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_stdin_rows_resume_only_with_identical_input(summing, tmp_path, capsys, monkeypatch):
    out, given = tmp_path / "out.jsonl", words(summing, Path("-"), tmp_path / "out.jsonl", "--json")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    piped(monkeypatch, ROWS[:6])
    with monkeypatch.context() as patched:
        patched.setattr("partita.library.batches.journal.Journal.publish", interrupted)
        assert run(given) == 130
    assert "6 of 6 rows answered" in capsys.readouterr().err
    piped(monkeypatch, ROWS[:5])
    assert run(given) == 2 and "another run" in capsys.readouterr().err
    piped(monkeypatch, ROWS[:6])
    assert run(given) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["input"], told["rows"], told["resumed"]) == ("-", 6, 6)
    assert [row["id"] for row in read(out)] == [row["id"] for row in ROWS[:6]]
    assert not any((tmp_path / "temporary").iterdir()), "nothing is left of what came through the pipe"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
