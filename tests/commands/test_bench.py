"""`partita bench` with real processes on the CPU, including contenders that fail."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita.bench.records import Bench
from partita.cli import run
from partita.library import bench as benchmark
from partita.library.engine.remote import PROCESS
from partita.partition_reports import storage
from tests.commands.test_cli import fails, succeeds
from tests.commands.test_signals import ABORTS, HANGS, library
from tests.conftest import Exported, TinyCheckpoint

QUICK = ("--rounds", "1", "--max-new-tokens", "4", "--prompt-tokens", "5")
NO_DEVICE = "cuda,cpu"
"""On a machine without CUDA this is the CPU, under another name."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def measured(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    out, _ = succeeds(capsys, "bench", *arguments, "--json")
    Bench.model_validate_json(out)
    found: dict[str, Any] = json.loads(out)
    return found


def test_bench_tokens_match_generate(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ("--prompt", "1,45,7,99", "--token-ids")
    found = measured(capsys, package, "--provider", "cpu", *prompt, "--rounds", "1", "--max-new-tokens", "6")
    out, _ = succeeds(
        capsys, "generate", package, "1,45,7,99", "--token-ids", "--max-new-tokens", "6", "--provider", "cpu", "--json"
    )
    ours = found["contenders"][0]["round_results"][0]["tokens"][0]
    theirs = json.loads(out)["rows"][0]["tokens"]
    assert ours[: len(theirs)] == theirs and len(ours) == 6


def test_failing_provider_exits_3_and_other_is_measured(package, capsys):
    assert run(["bench", str(package), "--providers", "cuda", "cpu", *QUICK]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("cpu: decode ") and "cuda failed: " in out
    assert err.startswith("partita: cuda: ")
    assert "cuda: " in fails(capsys, 3, "missing", "bench", package, "--provider", "cuda", *QUICK)


@pytest.mark.parametrize(
    ("source", "words"),
    [(ABORTS, "killed by SIGABRT"), pytest.param(HANGS, "no answer within 15 s", marks=pytest.mark.heavy)],
    ids=["crash", "hang"],
)
def test_crashing_or_hanging_provider_is_recorded_as_failed(package, tmp_path, capsys, source, words):
    named = f"mine={library(tmp_path, source)}"
    fails(capsys, 2, "mine is in no chain", "bench", package, "--provider", "cpu", "--provider-library", named)
    plugin = ("--provider-library", named, "--timeout", "15" if source is HANGS else "60")
    assert run(["bench", str(package), "--provider", "mine,cpu", "cpu", *QUICK, *plugin, "--json"]) == 3
    out, err = capsys.readouterr()
    lost, cpu = json.loads(out)["contenders"]
    assert (lost["status"], cpu["status"], cpu["rounds"]) == ("failed", "measured", 1)
    assert words in lost["error"] and words in err


def test_contender_killed_midway_keeps_finished_rounds(package, capsys, monkeypatch):
    take_turn = benchmark.Race.run_round

    def killed(self: benchmark.Race, racer: benchmark.Racer, number: int) -> None:
        if number == 2 and racer.name == NO_DEVICE:
            assert racer.engine is not None
            psutil.Process(racer.engine.process_id).kill()
        take_turn(self, racer, number)

    monkeypatch.setattr(benchmark.Race, "run_round", killed)
    words = ["--providers", NO_DEVICE, "cpu", "--rounds", "3", "--max-new-tokens", "4", "--json"]
    assert run(["bench", str(package), *words]) == 3
    lost, cpu = json.loads(capsys.readouterr().out)["contenders"]
    assert (lost["rounds"], cpu["rounds"], lost["ratios"]) == (1, 3, [])
    assert "SIGKILL" in lost["error"]


def bench_children() -> set[int]:
    """Workers that this process started; tests that run beside this one have theirs below another process."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if PROCESS in child.cmdline():
                found.add(child.pid)
    return found


@pytest.mark.parametrize(("when", "rounds"), [(1, [1, 0]), (0, [])])
def test_ctrl_c_prints_partial_result_and_ends_child_processes(package, capsys, monkeypatch, when, rounds):
    """Ctrl-C arrives in round `when`, between the two contenders."""
    take_turn = benchmark.Race.run_round

    def interrupted(self: benchmark.Race, racer: benchmark.Racer, number: int) -> None:
        if number == when and any(o.round_results and o.round_results[-1].round == when for o in self.racers):
            raise KeyboardInterrupt
        take_turn(self, racer, number)

    monkeypatch.setattr(benchmark.Race, "run_round", interrupted)
    before = bench_children()
    words = ["--providers", NO_DEVICE, "cpu", "--rounds", "5", "--max-new-tokens", "4", "--json"]
    assert run(["bench", str(package), *words]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err
    assert bench_children() <= before
    if not rounds:
        assert json.loads(out)["error"]["kind"] == "Interrupted"
        return
    found = json.loads(out)
    assert found["interrupted"] and sorted(entry["rounds"] for entry in found["contenders"]) == sorted(rounds)
    assert sum(len(entry["round_results"]) for entry in found["contenders"]) == 2 * when + 1


@pytest.fixture(scope="module")
def other(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """The same model in another lowering, with two rows."""
    return exported(tiny_checkpoint("llama"), attention="primitives", batch_size=2)


def test_two_packages_are_compared_on_each_chain(package, other, tmp_path, capsys):
    fails(capsys, 2, "is listed twice", "bench", package, "--provider", "cpu", "--against", package)
    chain = ("--against", other, "--provider", "cpu", "--baseline", "webgpu")
    fails(capsys, 2, "not among the measured chains: cpu", "bench", package, *chain)
    folder = tmp_path / "reports"
    given = ("--against", other, "--providers", "cpu", NO_DEVICE, *QUICK, "--report", folder, "--baseline", NO_DEVICE)
    found = measured(capsys, package, *given)
    names = [str(package), str(other)]  # both folders are called "package"
    assert [entry["name"] for entry in found["contenders"]] == [
        f"{name} on {chain}" for name in names for chain in ("cpu", NO_DEVICE)
    ]
    assert found["baseline"] == f"{package} on {NO_DEVICE}"
    assert [entry["package"] for entry in found["contenders"]] == [names[0]] * 2 + [names[1]] * 2
    assert [entry["attention"] for entry in (found["package"], *found["other_packages"])] == ["gqa", "primitives"]
    same = {entry["name"]: entry["same_tokens"] for entry in found["contenders"]}
    assert same.pop(found["baseline"]) is None and all(same.values())
    assert [len(entry["round_results"][0]["tokens"]) for entry in found["contenders"]] == [1, 1, 2, 2]
    assert sorted(path.name for path in folder.iterdir()) == [
        "package-cpu-1.json",
        "package-cpu-3.json",
        "package-cuda-cpu-2.json",
        "package-cuda-cpu-4.json",
    ]
    reports = [storage.read(path) for path in sorted(folder.iterdir())]
    assert [report.package and report.package.attention for report in reports] == ["gqa", "primitives"] * 2


def test_result_file_works_with_report_commands(package, tmp_path, capsys):
    file = tmp_path / "a result.json"
    out, err = succeeds(capsys, "bench", package, *QUICK, "--out", file)
    assert "note: provider cpu, by default: " in err
    assert out.startswith("cpu: decode ") and f'partita report show "{file}"' in err.replace("\n", "")
    stored = Bench.model_validate_json(file.read_text(encoding="utf-8"))
    shown, _ = succeeds(capsys, "report", "show", file, "--full")
    assert shown == out
    brief, _ = succeeds(capsys, "report", "show", file)
    assert out.startswith(brief) and len(brief.splitlines()) <= 10
    as_json, _ = succeeds(capsys, "report", "show", file, "--json")
    assert Bench.model_validate_json(as_json) == stored
    succeeds(capsys, "report", "html", file)
    page = file.with_suffix(".html").read_text(encoding="utf-8")
    assert "tokens/s" in page and stored.verdict[0] in page
    fails(capsys, 1, "the result of a bench", "report", "explain", file, "x")
