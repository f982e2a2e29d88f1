"""`partita.bench`: the measurements of `partita bench` as an object, without output."""

from __future__ import annotations

import json
from typing import Any

import pytest

import partita
from partita.bench.records import Bench
from partita.library import bench as benchmark
from partita.partition_reports import storage

QUICK: dict[str, Any] = {"rounds": 1, "max_new_tokens": 4}
NO_DEVICE = "cuda,cpu"
"""On a machine without CUDA this is the CPU, under another name."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(benchmark, "PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def test_bench_compares_two_chains_without_printing(package, tmp_path, capfd):
    result = partita.bench(package, [5, 6, 7], [["cuda", "cpu"], "cpu"], reports=tmp_path / "reports", **QUICK)
    first, cpu = result.contenders
    assert (first.name, cpu.name, result.baseline) == (NO_DEVICE, "cpu", "cpu")
    assert (first.status, cpu.rounds, first.same_tokens) == ("measured", 1, True)
    assert result.prompt_tokens == 3 and [len(turn.tokens[0]) for turn in cpu.round_results] == [4, 4]
    assert storage.read(tmp_path / "reports" / "cpu.json").request.chain_source == "given"
    result.save(tmp_path / "bench.json")
    assert Bench.model_validate_json((tmp_path / "bench.json").read_text()) == Bench.model_validate(
        json.loads(result.model_dump_json(by_alias=True))
    )
    assert result.to_text(tmp_path / "bench.txt").startswith(f"{NO_DEVICE} is ") and "tokens/s" in result.to_html()
    assert (tmp_path / "bench.txt").read_text() == result.to_text()
    assert repr(result) == f"<partita.BenchResult: {'; '.join(result.verdict)}>"
    assert capfd.readouterr() == ("", "")


def test_failed_chain_is_in_result_unless_all_fail(package):
    result = partita.bench(package, chains=["cuda", "cpu"], **QUICK)
    lost, cpu = result.contenders
    assert (lost.status, cpu.status) == ("failed", "measured") and "cuda" in (lost.error or "")
    with pytest.raises(partita.ProviderError, match="cuda: "):
        partita.bench(package, chains="cuda", **QUICK)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"chains": []}, "`chains` is empty"),
        ({"chains": "cpu", "baseline": "webgpu"}, "`baseline=webgpu`: not among"),
        ({"chains": "cpu", "prompt": ["a", "b"]}, "`prompt` has 2 prompts"),
    ],
)
def test_invalid_bench_arguments_raise_argument_error(package, arguments, says):
    with pytest.raises(partita.ArgumentError) as caught:
        partita.bench(package, **arguments)
    assert says in str(caught.value) and "--" not in str(caught.value)
