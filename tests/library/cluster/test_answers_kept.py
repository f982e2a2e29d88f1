"""What the driver does with answers: parts of blocks, a disk that is full, rows that do not come back. Without Ray."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.errors import GenerationError, ProviderError, ResourceError
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowAnswer
from partita.library.chain import ChainOptions
from partita.library.cluster import running as running_module
from partita.library.cluster.options import ClusterOptions, Means, read_cluster
from partita.library.cluster.running import ClusterRun
from partita.library.cluster.worker import ROWS, told_of
from tests.conftest import require
from tests.library.cluster.test_cluster_run import setup_of

SECONDS = 30.0
COUNT = 64
Change = Callable[[int, list[str]], list[str]]
"""What becomes of the answers of a block on their way."""


def answer(index: int) -> str:
    return json.dumps(RowAnswer(index, f"row-{index}", None, (1, 2, 3), 1, "stop", None, None).to_json())


class Method:
    """A method of an actor that is none: what it is told, it does at once."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.remote = act


class Beside:
    """The desk and the ledger."""

    def __init__(self) -> None:
        self.blocks: list[list[InputRow]] = []
        self.gone: list[int] = []
        """Numbers of which the rows were let go."""
        self.closed = False
        self.given: dict[str, Any] = {}
        """What Ray Data was given for its workers."""
        self.context = SimpleNamespace()
        """Its settings."""
        self.put = Method(lambda texts: self.blocks.append([ROWS.validate_json(text) for text in texts]))
        self.close = Method(self._close)
        self.kept = Method(lambda numbers: self.gone.extend(numbers))
        self.read = Method(lambda: ([], None))

    def _close(self) -> None:
        self.closed = True


class Blocks:
    """In place of Ray Data: every block is answered as soon as its rows were read."""

    def __init__(self, beside: Beside, numbers: list[int], change: Change, given: dict[str, Any]) -> None:
        self._beside, self._numbers, self._change, self._given = beside, numbers, change, given

    def map_batches(self, worker: Any, **given: Any) -> Blocks:
        self._given.update(given)
        return self

    def iter_batches(self, **_: Any) -> Iterator[Any]:
        for number in self._numbers:
            deadline = time.monotonic() + SECONDS
            while len(self._beside.blocks) <= number and not self._beside.closed:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            rows = self._beside.blocks[number] if number < len(self._beside.blocks) else []
            yield told_of(number, self._change(number, [answer(row.index) for row in rows]))


def run_of(
    journal: Journal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    options: ClusterOptions | None = None,
    **settings: Any,
) -> tuple[Beside, Any]:
    """A run over COUNT rows, and what is beside it. `settings` are those that Ray Data has."""
    require("pyarrow")
    beside, context = Beside(), SimpleNamespace(**settings)
    data = SimpleNamespace(
        DataContext=SimpleNamespace(get_current=lambda: context),
        ActorPoolStrategy=dict,
        from_items=lambda items, **_: Blocks(beside, [item["block"] for item in items], change, beside.given),
    )
    ray = SimpleNamespace(data=data, get=lambda value: value, __version__="0")
    monkeypatch.setattr(running_module, "means_of", lambda _: Means({"CPU": 2.0}, (2.0,)))
    monkeypatch.setattr(running_module, "check_kinds", lambda *_: None)
    monkeypatch.setattr(running_module, "_beside", lambda *_: beside)
    run = ClusterRun(
        options or read_cluster("local", 2, "cpu"), setup_of(tmp_path, where=ChainOptions()), 2, journal, COUNT
    )
    rows = (InputRow(index, {"tokens": [1]}) for index in range(COUNT) if index not in journal)
    beside.context = context
    return beside, lambda: run._go(ray, rows)


def as_they_are(number: int, answers: list[str]) -> list[str]:
    return answers


def test_a_block_is_let_go_when_its_last_answer_is_kept_and_not_before(tmp_path: Path) -> None:
    require("pyarrow")
    table = told_of(7, [answer(index) for index in range(5)])
    with Journal(tmp_path / "journal", {}, 0) as journal:
        run = ClusterRun(read_cluster("local", 1, "cpu"), setup_of(tmp_path), 2, journal, 5)
        assert run._take(table.slice(0, 3)) == []
        assert run._take(table.slice(1, 2)) == [], "the same answers again are no others"
        assert run._take(table.slice(3)) == [7] and len(journal) == 5 and run.again == 2
        assert run._take(table) == [7] and run.again == 7  # given again when it was whole: nobody needs it


@pytest.mark.usefixtures("no_bytecode")
def test_a_disk_that_is_full_in_the_middle_loses_and_doubles_nothing(tmp_path: Path, monkeypatch) -> None:
    path, before = tmp_path / "journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, {}, 0) as journal:
        beside, go = run_of(journal, tmp_path, monkeypatch, as_they_are)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        try:
            with pytest.raises(ResourceError, match="cannot be written.*the same command goes on with the rest"):
                go()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        done = len(journal)
        whole = [n for n, rows in enumerate(beside.blocks) if all(row.index in journal for row in rows)]
    assert 0 < done < COUNT and beside.gone == whole and beside.closed
    assert path.read_bytes().endswith(b"}\n"), "no line is cut off"
    with Journal(path, {}, 0) as journal:
        assert journal.resumed == done
        _, go = run_of(journal, tmp_path, monkeypatch, as_they_are)
        assert go().rows == COUNT - done
        assert [json.loads(line)["index"] for line in journal.answers()] == list(range(COUNT))
    assert path.read_bytes().count(b"\n") == 1 + COUNT


def test_rows_that_come_back_without_an_answer_are_told_and_the_next_run_has_them(tmp_path: Path, monkeypatch) -> None:
    """The last ones above all, of which nothing else would tell."""
    with Journal(tmp_path / "journal", {}, 0) as journal:
        _, go = run_of(journal, tmp_path, monkeypatch, lambda number, answers: answers[: -number // 2])
        with pytest.raises(GenerationError, match="gave back no answer to .* rows; the answers so far are kept"):
            go()
        _, go = run_of(journal, tmp_path, monkeypatch, as_they_are)
        go()
        assert [json.loads(line)["index"] for line in journal.answers()] == list(range(COUNT))


@pytest.mark.parametrize("all_answered", [True, False])
def test_a_cluster_that_is_gone_is_one_line_and_what_was_answered_stays(
    tmp_path: Path, monkeypatch, all_answered
) -> None:
    """With all that it has of the run: who is asked what went wrong is gone as well."""

    def gone(*_: Any) -> Any:
        raise RuntimeError("The actor died:\n all of them")

    def some(number: int, answers: list[str]) -> list[str]:
        return answers if all_answered or number < 3 else gone()

    with Journal(tmp_path / "journal", {}, 0) as journal:
        beside, go = run_of(journal, tmp_path, monkeypatch, some)
        beside.read = Method(gone)
        with pytest.raises(ProviderError, match="the cluster gave up: The actor died: all of them") as raised:
            go()
        assert "\n" not in str(raised.value) and (len(journal) == COUNT if all_answered else 0 < len(journal) < COUNT)


@pytest.mark.parametrize(("settings", "now"), [({"execution_no_progress_timeout_s": 1800.0}, -1), ({}, None)])
def test_a_block_may_take_as_long_as_it_takes(tmp_path: Path, monkeypatch, settings, now) -> None:
    """And so may a machine that is added. Ray Data gives a run up after half an hour, in versions that have it."""
    with Journal(tmp_path / "journal", {}, 0) as journal:
        beside, go = run_of(journal, tmp_path, monkeypatch, as_they_are, **settings)
        go()
    assert getattr(beside.context, "execution_no_progress_timeout_s", None) == now


@pytest.mark.parametrize(
    ("workers", "sizes"),
    [("1-40", (1, 8, 2)), ("3-40", (3, 8, 3)), ("1-1", (1, 1, 1)), ("2-2", (2, 2, 2)), ("20-40", (8, 8, 8))],
)
def test_a_run_begins_with_the_workers_that_have_work_and_ray_data_plans_with_what_each_needs(
    tmp_path: Path, monkeypatch, workers, sizes
) -> None:
    """By one processor for each it finds no room for a worker more, and asks for no machine."""
    options = read_cluster("auto", workers, "cpu", cpus=4)
    with Journal(tmp_path / "journal", {}, 0) as journal:
        beside, go = run_of(journal, tmp_path, monkeypatch, as_they_are, options)
        monkeypatch.setattr(running_module, "block_rows", lambda *_: COUNT // 8)
        go()
    pool = beside.given["compute"]
    assert (pool["min_size"], pool["max_size"], pool["initial_size"]) == sizes
    assert beside.given["num_cpus"] == 4 and "num_gpus" not in beside.given  # which need a batch size
    assert beside.given["ray_remote_args_fn"]()["num_cpus"] == 4


def test_what_is_planned_with_is_what_the_largest_worker_needs(tmp_path: Path, monkeypatch) -> None:
    options = read_cluster("auto", 4, None, ("cuda,cpu", "cpu"))
    with Journal(tmp_path / "journal", {}, 0) as journal:
        beside, go = run_of(journal, tmp_path, monkeypatch, as_they_are, options)
        monkeypatch.setattr(running_module, "means_of", lambda _: Means({"CPU": 16.0, "GPU": 2.0}, (16.0,)))
        go()
    assert beside.given["num_cpus"] == 4
    dealt = [beside.given["ray_remote_args_fn"]() for _ in range(2)]
    assert [(each["num_cpus"], each["num_gpus"]) for each in dealt] == [(1, 1), (4, 0)]
