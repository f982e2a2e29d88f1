"""Batches whose rows use different adapters: each completion matches a single run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import partita
from partita.cli import run
from partita.library.engine.requests import Ticket, Work
from partita.library.sampling import Sampling
from partita.package.folder import read_manifest
from tests.adapters import save_adapter
from tests.conftest import Exported, TinyCheckpoint
from tests.export.checkpoint.adapters.test_switched import EVERY, adapters

__all__ = ["adapters"]
SHORT, LONG = [5, 9, 33, 120, 7], [*range(3, 40)]
ASKED: list[tuple[list[int], str | None]] = [
    (SHORT, "loud"),
    (SHORT, None),
    (LONG, "small"),
    (LONG, "loud"),
    (SHORT, "small"),
    (LONG, None),
    (LONG, "loud"),
]


def answers(package: Path, asked: list[tuple[list[int], str | None]]) -> tuple[list[tuple[int, ...]], int]:
    """What requests of one scheduler are answered, and the most rows that were at work at once."""
    with partita.load(package, providers="cpu") as model:
        scheduler = model.scheduler()
        sampling = Sampling(temperature=0.0, max_new_tokens=6)
        tickets: list[Ticket] = [
            scheduler.submit(Work(tuple(prompt), sampling, adapter=name)) for prompt, name in asked
        ]
        most = 0
        while scheduler.step():
            most = max(most, scheduler.running)
        assert [ticket.error for ticket in tickets] == [None] * len(tickets)
        return [ticket.result.tokens for ticket in tickets], most


def alone(package: Path) -> list[tuple[int, ...]]:
    """Each answer of a generation that has one adapter for all rows."""
    with partita.load(package, providers="cpu") as model:
        rows = model.manifest.graph.batch_size
        return [
            model.generate([prompt] * rows, max_new_tokens=6, adapter=name, stop_token_ids=[]).run().results[0].tokens
            for prompt, name in ASKED
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        pytest.param({"batch_size": 2, "static_shapes": True, "prefill_chunk": 6}, marks=pytest.mark.heavy),
        pytest.param(
            {"batch_size": 2, "static_shapes": True, "prefill_chunk": 6, "attention": "primitives"},
            marks=pytest.mark.heavy,
        ),
        pytest.param({"batch_size": 2, "attention": "onnx24"}, marks=pytest.mark.heavy),
        pytest.param({"batch_size": 2, "precision": "int4", "block_size": 32}, marks=pytest.mark.heavy),
        pytest.param({"batch_size": 2, "precision": "fp16"}, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_batch_with_different_adapters_matches_single_runs(
    options: Any, tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    if options.get("precision") == "fp16":  # what the loud one adds is as large as the rest, and its rounding as well
        adapters = {**adapters, "loud": save_adapter(tmp_path / "soft", checkpoint, EVERY, lora_alpha=1)}
    given = adapters
    package = exported(checkpoint, with_adapters=given, **options)
    manifest = read_manifest(package)
    assert manifest.graph.adapters_by_row and manifest.verification.status == "verified"
    wanted = alone(package)
    found, most = answers(package, ASKED)
    assert found == wanted and most == options["batch_size"]
    assert len({*wanted[:2], wanted[4]}) == 3  # of the same prompt, with other adapters
    single = exported(checkpoint, with_adapters=given, **{**options, "batch_size": 1})
    assert not read_manifest(single).graph.adapters_by_row
    assert alone(single) == wanted


def test_requests_run_in_turn_at_batch_size_1(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path]
) -> None:
    package = exported(tiny_checkpoint("llama"), batch_size=1, with_adapters=adapters)
    found, most = answers(package, ASKED)
    assert found == alone(package) and most == 1


def test_batch_file_selects_adapter_per_row(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path], tmp_path: Path
) -> None:
    package = exported(tiny_checkpoint("llama"), batch_size=3, with_adapters=adapters)
    rows = [{"tokens": prompt, "stop_token_ids": [], **({"adapter": name} if name else {})} for prompt, name in ASKED]
    wrong = [{"tokens": SHORT, "adapter": "other"}, {"tokens": SHORT, "adapter": 3}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *wrong]))
    asked = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    code = run(["generate", str(package), *asked, "--max-new-tokens", "6", "--temperature", "0"])
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found.sort(key=lambda row: row["index"])
    assert code in (0, 1)
    assert [tuple(row["tokens"]) for row in found[: len(rows)]] == alone(package)
    assert "has no adapter of this name; choose one of loud, small" in found[-2]["error"]
    assert found[-2]["error"].startswith("field adapter other: ") and "--" not in found[-2]["error"]
    assert "adapter is '3'; it must be a string" in found[-1]["error"]


@pytest.mark.heavy
def test_static_graphs_support_adapters_per_row(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path]
) -> None:
    """Prefill and decode graphs with fixed sizes only, as compilers require."""
    given = adapters
    package = exported(tiny_checkpoint("llama"), with_adapters=given, batch_size=2, static_shapes=True, prefill_chunk=6)
    graph = read_manifest(package).graph
    assert len(graph.files) == 2 and graph.adapters_by_row and graph.adapters_of_every_row
    assert all(isinstance(size, int) for file in graph.files for port in file.adapter_inputs for size in port.shape)
    for file in graph.files:
        model = onnx.load(package / file.file, load_external_data=False)
        names = {port.name for port in file.adapter_inputs}
        assert names <= {port.name for port in model.graph.input}
        assert not names & {tensor.name for tensor in model.graph.initializer}, (
            "a compiler would take it for a constant"
        )
    found, most = answers(package, ASKED)
    assert (found, most) == (alone(exported(tiny_checkpoint("llama"), with_adapters=given, batch_size=3)), 2)
