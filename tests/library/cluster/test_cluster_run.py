"""Rows on a cluster that is started here: nothing is lost and nothing is twice, whatever is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita import __version__
from partita.cli import run
from partita.errors import PackageError, ResourceError
from partita.foreign.folder import open_folder
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowDefaults
from partita.library.chain import ChainOptions
from partita.library.cluster import worker as worker_module
from partita.library.cluster.ledger import Ledger
from partita.library.cluster.options import CHAIN_VARIABLE, read_cluster
from partita.library.cluster.running import ClusterRun, portable
from partita.library.cluster.worker import ANSWER, BLOCK, SETUPS, Setup, Worker
from partita.library.cluster.worker import ROWS as ROWS_ADAPTER
from partita.library.contents import contents_hash
from partita.library.sampling import Sampling
from partita.library.speculation import Speculation
from partita.package import MANIFEST
from tests.conftest import REPOSITORY, require
from tests.runtime.handmade import handmade, known_tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of what Ray Data itself does
ROWS = [
    InputRow(n, {"id": f"row-{n}", "tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 20 + n % 9}) for n in range(64)
]
EMPTY = 5
POISON = 7
"""The row that has no prompt."""


@pytest.fixture(autouse=True)
def working_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import Partita from where the tests do."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPOSITORY), before])))


def setup_of(package: Path, **others: Any) -> Setup:
    given: dict[str, Any] = {
        "package": str(package),
        "contents": contents_hash(package, open_folder(package)) if (package / MANIFEST).is_file() else "",
        "partita": __version__,
        "where": ChainOptions(threads=1),
        "choice": {"variant": None, "contract": None, "max_length": None},
        "defaults": RowDefaults(Sampling(temperature=0.0, max_new_tokens=20)),
        "token_ids": True,
    }
    return Setup(**{**given, **others})


def workers() -> list[psutil.Process]:
    """Processes of actors that hold a package, of clusters that this process has started."""
    return [process for process in psutil.Process().children(recursive=True) if "MapWorker" in title_of(process)]


def end_the_busiest(chain: str = "cpu") -> int:
    """Kill -9 the worker of a chain that has computed most, so one that is at work and not one that starts; its process
    id.
    """
    theirs = [process for process in workers() if process.environ().get(CHAIN_VARIABLE) == chain]
    victim = max(theirs, key=lambda process: sum(process.cpu_times()[:2]))
    victim.kill()
    return victim.pid


def title_of(process: psutil.Process) -> str:
    """What a process calls itself; nothing of one that has just ended."""
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_loses_and_doubles_nothing(tmp_path):
    require("ray")
    package = handmade(tmp_path / "package", batch=3)
    killed: list[int] = []

    def heard(_: ClusterRun) -> None:
        if not killed:
            killed.append(end_the_busiest())

    rows = [InputRow(EMPTY, {"id": "empty"}) if row.index == EMPTY else row for row in ROWS]
    with Journal(tmp_path / "journal", {}, 0) as journal:
        cluster = ClusterRun(read_cluster("local", 2, "cpu"), setup_of(package), 3, journal, len(rows), heard)
        report = cluster.go(iter(rows))
        answers = [json.loads(line) for line in journal.answers()]
    assert [answer["index"] for answer in answers] == list(range(len(rows)))
    assert "one of prompt, messages, tokens" in answers[EMPTY]["error"]
    for row, answer in zip(rows, answers, strict=True):
        if row.index != EMPTY:
            assert (answer["id"], answer["tokens"]) == (row.data["id"], expected(row)), row.index
    assert killed and report.rows == len(rows) and report.wanted == 2
    # One that was killed before its first block was done, or began after the last, has nothing to report.
    assert report.workers and sum(worker.rows for worker in report.workers) >= len(rows)
    assert all(sum(phase.nodes.values()) > 0 for worker in report.workers for phase in worker.placement)
    assert {worker.chain for worker in report.workers} == {("CPUExecutionProvider",)}
    assert {worker.python.split(" ")[0] for worker in report.workers} == {sys.executable}


class DiesOnOne(Worker):
    """A worker whose process ends when it is given one of the rows."""

    def _submit(self, row: InputRow, block: Any) -> None:
        if row.index == POISON:
            os._exit(1)
        super()._submit(row, block)


@pytest.mark.heavy
def test_a_row_that_ends_every_process_is_an_error_and_its_neighbours_are_not(tmp_path):
    require("ray")
    package = handmade(tmp_path / "package", batch=3)
    with Journal(tmp_path / "journal", {}, 0) as journal:
        cluster = ClusterRun(
            read_cluster("local", 1, "cpu"), setup_of(package), 3, journal, len(ROWS), worker=DiesOnOne
        )
        report = cluster.go(iter(ROWS))
        answers = [json.loads(line) for line in journal.answers()]
    assert [answer["index"] for answer in answers] == list(range(len(ROWS))) and report.rows == len(ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        if row.index == POISON:
            assert "process ended each time" in answer["error"]
        else:
            assert answer["tokens"] == expected(row), row.index


class Told(Worker):
    """A worker in this process, with a ledger that is an object and no actor."""

    def _ask(self, what: str, *said: Any) -> Any:
        return getattr(self._ledger, what)(*said)


class Given(Ledger):
    """A ledger with a block of rows."""

    rows: Sequence[InputRow] = ()

    def take(self, number: int) -> list[str]:
        return [ROWS_ADAPTER.dump_json(portable(row)).decode() for row in self.rows]


def told_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger, **more: Any) -> Told:
    monkeypatch.setattr(worker_module, "_place", lambda name: {"worker": name})
    setup = setup_of(handmade(tmp_path / "package", batch=3), **more)
    return Told(SETUPS.dump_json(setup).decode(), ledger)


def called(worker: Told, rows: Sequence[InputRow]) -> Any:
    require("pyarrow")
    import pyarrow

    worker._ledger.rows = rows
    return worker(pyarrow.table({BLOCK: [4]}))


def answers_of(worker: Told, rows: Sequence[InputRow]) -> dict[int, dict[str, Any]]:
    table = called(worker, rows)
    found = [json.loads(text) for text in table[ANSWER].to_pylist()]
    assert len(found) == len(rows) and set(table[BLOCK].to_pylist()) <= {4}
    return {answer["index"]: answer for answer in found}


def test_after_two_deaths_rows_are_answered_alone_and_only_the_one_that_kills_is_an_error(tmp_path, monkeypatch):
    ledger, rows = Given(), ROWS[:6]
    for _ in range(2):
        ledger.began("block 4")  # and the process ended
        ledger.began("row 4")
    answers = answers_of(told_worker(tmp_path, monkeypatch, ledger), rows)
    assert "process ended each time" in answers[4]["error"]
    assert all(answers[row.index]["tokens"] == expected(row) for row in rows if row.index != 4)
    assert ledger.began("row 4") == 0  # it has its answer: nothing is held against another run


class Died(BaseException):
    """The process of a worker has ended."""


@pytest.mark.parametrize("killers", [(4,), (1, 4), (0, 2, 5), (0, 1, 2, 3)])
def test_every_row_that_kills_costs_two_workers_beside_the_two_of_its_block(tmp_path, monkeypatch, killers):
    ledger, deaths = Given(), 0
    worker = told_worker(tmp_path, monkeypatch, ledger)
    submit = worker._submit

    def dies(row: InputRow, block: Any) -> None:
        if row.index in killers:
            raise Died
        submit(row, block)

    monkeypatch.setattr(worker, "_submit", dies)
    while True:
        try:
            answers = answers_of(worker, ROWS[:6])
            break
        except Died:
            deaths += 1
            assert deaths <= 2 + 2 * len(killers)
    assert deaths == 2 + 2 * len(killers)
    for row in ROWS[:6]:
        if row.index in killers:
            assert "process ended each time" in answers[row.index]["error"]
        else:
            assert answers[row.index]["tokens"] == expected(row)
    assert not ledger._begun, "nothing is held against another run"


def test_an_error_that_loses_the_batch_ends_the_run_and_is_no_rows_answer(tmp_path, monkeypatch):
    worker = told_worker(tmp_path, monkeypatch, Given())

    def full(*_: object, **__: object) -> Any:
        raise ResourceError("out of memory")

    monkeypatch.setattr(worker._scheduler._engine, "step", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        called(worker, ROWS[:4])


def test_a_block_behind_the_last_row_has_no_answers(tmp_path, monkeypatch):
    assert answers_of(told_worker(tmp_path, monkeypatch, Given()), []) == {}


def test_what_has_no_form_in_json_is_a_rows_error_where_it_is_read_and_nothing_elsewhere() -> None:
    kept = portable(InputRow(1, {"tokens": [1], "image": b"\x89PNG", "note": float("inf")}))
    assert kept.data == {"tokens": [1]} and kept.error is None
    for value in (b"x", float("inf")):
        refused = portable(InputRow(2, {"tokens": [1], "temperature": value, "id": "x"}))
        assert refused.error is not None and "temperature is" in refused.error and refused.key == "x"


def test_guesses_are_asked_of_the_workers_too(tmp_path, monkeypatch):
    worker = told_worker(tmp_path, monkeypatch, Given(), speculation=Speculation("ngram"))
    assert (
        worker._failure is not None and "--speculate ngram" in worker._failure["said"]
    )  # of this package they are not


def expected(row: InputRow) -> list[int]:
    """What the package answers, by the arithmetic that it consists of."""
    return list(known_tokens(list(row.data["tokens"]), row.data["max_new_tokens"]))


@pytest.mark.heavy
def test_another_package_at_the_path_of_the_workers_is_refused(tmp_path):
    require("ray")
    package = handmade(tmp_path / "package", batch=3)
    with Journal(tmp_path / "journal", {}, 0) as journal:
        setup = setup_of(package, contents="0")
        asked = ClusterRun(read_cluster("local", 1, "cpu"), setup, 3, journal, len(ROWS))
        with pytest.raises(PackageError, match="another package on"):
            asked.go(iter(ROWS))


def words(tmp_path: Path, *more: str) -> list[str]:
    package, source = handmade(tmp_path / "package", batch=3), tmp_path / "in.jsonl"
    source.write_text('{"tokens": [1, 2]}\n', encoding="utf-8")
    return ["generate", str(package), "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--token-ids", *more]


def test_an_address_that_does_not_answer_is_one_line(tmp_path, capsys):
    require("ray")
    assert run(words(tmp_path, "--address", "127.0.0.1:1")) == 2
    said = capsys.readouterr().err
    assert "--address 127.0.0.1:1: no cluster answers there" in said and "ray start --head" in said
    assert said.count("\n") == 1


def test_without_ray_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(words(tmp_path, "--address", "auto")) == 1
    assert capsys.readouterr().err.startswith("partita: ray is not installed; ")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--workers", "2"), "give its address with --address"),
        (("--address", "nowhere"), "give auto, local or HOST:PORT"),
        (("--worker-cpus", "2"), "give its address with --address"),
        (("--address", "auto", "--workers", "0"), "must be between 1"),
        (("--address", "auto", "--workers", "2-8"), "give the processors of each worker with --worker-cpus"),
        (("--address", "auto", "--max-cpu-nodes", "0"), "for a run on this machine"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(tmp_path, capsys, more, said):
    assert run(words(tmp_path, *more)) == 2
    assert said in capsys.readouterr().err
