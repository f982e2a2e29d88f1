"""Prompt files on a Ray cluster give the rows of one process, also after kills. `make test-ray` runs all."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import partita
from partita.cli import run
from partita.commands.generate import RowBar
from partita.errors import GenerationError, PackageError
from partita.foreign.folder import open_folder
from partita.library.batches import cluster as cluster_module
from partita.library.batches.batch_run import run_file
from partita.library.batches.cluster import Worker, answer_on_cluster
from partita.library.batches.journal import journal_path
from partita.library.batches.prompt_files import scan_file
from partita.library.batches.rows import RowDefaults
from partita.library.sampling import Sampling
from partita.options.generation import GenerateCommand
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint, require
from tests.runtime.handmade_packages import handmade, known_tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of what Ray Data itself does
SECONDS = 120.0
EMPTY, POISON = 5, 37


@pytest.fixture(autouse=True)
def working_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import Partita from where the tests do."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPOSITORY), before])))


class Files:
    """A package whose answers a few lines of numpy know, and a prompt file with a row that has no prompt."""

    def __init__(self, folder: Path, count: int) -> None:
        self.package = handmade(folder / "package", batch=3)
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        rows: list[dict[str, Any]] = [
            {"id": f"row-{n}", "tokens": [n % 60 + 1, n % 7 + 1], "max_new_tokens": 20 + n % 9} for n in range(count)
        ]
        self.rows: list[dict[str, Any]] = [{"id": "empty"} if n == EMPTY else row for n, row in enumerate(rows)]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def words(self, *more: str, out: Path | None = None) -> list[str]:
        given = ["-i", str(self.source), "-o", str(out or self.out), "--token-ids", "-e", "cpu", "--threads", "1"]
        return ["generate", str(self.package), *given, *more]

    def check(self) -> None:
        """Every row is there once, in order, with the answer that one process gives."""
        alone = self.out.with_name("alone.jsonl")
        assert run(self.words(out=alone)) == 0
        assert self.out.read_bytes() == alone.read_bytes()
        for index, line in enumerate(self.out.read_text(encoding="utf-8").splitlines()):
            found, asked = json.loads(line), self.rows[index]
            assert (found["index"], found["id"]) == (index, asked["id"])
            if index != EMPTY:
                assert found["tokens"] == known_tokens(asked["tokens"], asked["max_new_tokens"]), index
        assert index == len(self.rows) - 1 and not journal_path(self.out).exists()

    def answer(self, **changes: Any) -> None:
        options = GenerateCommand(
            package=self.package, providers="cpu", threads=1, token_ids=True, address="local", workers=1
        )
        rows, manifest = scan_file(self.source), open_folder(self.package).model_copy(update=changes)
        defaults = RowDefaults(Sampling(temperature=0.0, max_new_tokens=20))
        answer = partial(answer_on_cluster, options=options, manifest=manifest, count=rows.rows)
        run_file(rows, self.out, answer, defaults, package="p", options={})


def workers(process: psutil.Process) -> list[psutil.Process]:
    """Processes below `process` that hold a package."""
    return [each for each in process.children(recursive=True) if "MapWorker" in title_of(each)]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_killed_worker_neither_loses_nor_duplicates_rows(tmp_path, monkeypatch, capsys):
    require("ray")
    files, killed = Files(tmp_path, 400), list[int]()
    show = RowBar.show

    def kills(bar: RowBar, progress: Any) -> None:
        show(bar, progress)
        if not killed and progress.done >= 40:
            busiest = max(workers(psutil.Process()), key=lambda each: sum(each.cpu_times()[:2]))
            busiest.kill()
            killed.append(busiest.pid)

    with monkeypatch.context() as patched:
        patched.setattr(RowBar, "show", kills)
        assert run(files.words("--address", "local", "--workers", "2", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert killed and told["rows"] == 400 and told["errors"] == 1
    files.check()


@pytest.mark.heavy
def test_killed_driver_resumes_without_lost_or_duplicate_rows(tmp_path):
    require("ray")
    files = Files(tmp_path, 3000)
    command = [sys.executable, "-m", "partita", *files.words("--address", "local", "--workers", "2")]
    lines = 0
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        held: list[psutil.Process] = []
        deadline = time.monotonic() + SECONDS
        while lines_of(files.out) < lines + 100:
            assert process.poll() is None and time.monotonic() < deadline
            held = workers(psutil.Process(process.pid))
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=SECONDS)
        _, alive = psutil.wait_procs(held, timeout=SECONDS)
        assert held and not alive, "workers end with the driver"
        lines = lines_of(files.out)
        assert not files.out.exists()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "rows already answered by an earlier run" in " ".join(done.stderr.split()), (
        done.stderr
    )
    files.check()


def lines_of(out: Path) -> int:
    journal = journal_path(out)
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


class DiesOnOne(Worker):
    """A worker whose process ends with one of the rows."""

    def __call__(self, table: Any) -> Any:
        if any(pickle.loads(row).index == POISON for row in table[cluster_module.ROW].to_pylist()):
            os._exit(1)
        return super().__call__(table)


@pytest.mark.heavy
def test_rows_crashing_every_worker_are_named_and_others_complete(tmp_path, monkeypatch):
    require("ray")
    files = Files(tmp_path, 120)
    with monkeypatch.context() as patched:
        patched.setattr(cluster_module, "Worker", DiesOnOne)
        with pytest.raises(GenerationError, match=r"no answer to \d+ rows \(.*worker processes ended"):
            files.answer()
    assert 60 <= lines_of(files.out) - 1 < 120
    files.answer()
    files.check()


@pytest.mark.heavy
def test_package_mismatch_on_worker_raises_package_error(tmp_path):
    require("ray")
    files = Files(tmp_path, 20)
    with pytest.raises(PackageError, match="worker on .*another version of Partita than the command"):
        files.answer(tokenizer="other")


@pytest.mark.heavy
def test_ray_example_of_batches_page_completes_parquet_table(
    tmp_path: Path, exported: Exported, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the code of docs/batches.md with a local package and cluster."""
    require("ray")
    import pyarrow
    import ray
    from pyarrow import parquet

    package = exported(tiny_checkpoint("llama"), attention="gqa", batch_size=2)
    page = (REPOSITORY / "docs/batches.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    here = {"/shared/package": str(package), '"cuda"': '"cpu"', "concurrency=8, num_gpus=1": "concurrency=1"}
    for there, changed in here.items():
        assert there in block
        block = block.replace(there, changed)
    monkeypatch.chdir(tmp_path)
    prompts = [f"return the {number}" for number in range(100)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), "prompts.parquet")
    ray.init(address="local", include_dashboard=False)
    try:
        exec(block, {"__name__": "__main__"})
    finally:
        ray.shutdown()
    answers = {row["prompt"]: row["answer"] for row in parquet.read_table("answers").to_pylist()}
    with partita.load(package, "cpu", threads=1) as model:
        first = model.generate([prompts[0]] * 2, max_new_tokens=64).run().text
    assert answers.keys() == set(prompts) and answers[prompts[0]] == first


def test_unreachable_cluster_address_prints_single_error_line(tmp_path, capsys):
    require("ray")
    assert run(Files(tmp_path, 2).words("--address", "127.0.0.1:1")) == 2
    said = capsys.readouterr().err
    assert "--address 127.0.0.1:1: no cluster at this address" in said and "ray start --head" in said
    assert said.count("\n") == 1


def test_missing_ray_is_reported_as_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(Files(tmp_path, 2).words("--address", "auto")) == 1
    assert capsys.readouterr().err.startswith("partita: ray is not installed; ")
