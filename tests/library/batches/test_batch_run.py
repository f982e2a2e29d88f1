"""Batch runs with scheduler and journal: each row equals its individual run for every lowering and state."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, ProviderError
from partita.library.batches.batch_run import AHEAD, BatchRunResult, run_file, run_rows
from partita.library.batches.prompt_files import scan_file
from partita.library.batches.rows import AnswerRow, InputRow, RowDefaults
from partita.library.chain import read_chain
from partita.library.engine.local import LocalEngine
from partita.library.sampling import Sampling, Suggestion, complete_sampling
from partita.options.generation import BatchOptions
from partita.options.groups import ProviderChain
from partita.package.folder import read_manifest
from partita.runtime.ort.binding import Binding
from tests.conftest import Exported, TinyCheckpoint
from tests.runtime.handmade_packages import ALL, handmade, known_tokens

CPU = read_chain(ProviderChain(providers="cpu", threads=1))
DEFAULTS = RowDefaults(complete_sampling(Sampling(max_new_tokens=9), Suggestion()), base_seed=11)
HEAVY = pytest.mark.heavy


def opened(folder: Path) -> closing[LocalEngine]:
    engine = LocalEngine(folder, read_manifest(folder), CPU, observe=False)
    engine.open(BatchOptions())
    return closing(engine)


def answered(
    engine: LocalEngine, rows: list[InputRow], defaults: RowDefaults = DEFAULTS, text: Any = None
) -> list[Any]:
    """Answers as JSON has them, in the order of the rows."""
    engine.use_text(text)
    return in_order(run_rows(rows, DEFAULTS, engine, text, engine.manifest.graph.vocab_size))


def in_order(found: Iterable[AnswerRow]) -> list[Any]:
    return [json.loads(each.to_line()) for each in sorted(found, key=lambda each: each.index)]


def rows_of(count: int, vocab: int, longest: int) -> list[InputRow]:
    """Prompts of every length, with budgets that differ, and some that draw."""
    draw = random.Random(3)
    rows = []
    for index in range(count):
        tokens = [draw.randrange(3, vocab) for _ in range(1 + draw.randrange(longest))]
        options: dict[str, Any] = {"max_new_tokens": 1 + draw.randrange(14)}
        if index % 4 == 3:
            options.update(temperature=0.9, top_k=20, repetition_penalty=1.2)
        rows.append(InputRow(index, {"tokens": tokens, "id": f"r{index}", **options}))
    return rows


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention": "gqa"}),
        pytest.param("gemma2", {"attention": "onnx24"}, marks=HEAVY),
        pytest.param("llama", {"attention": "primitives"}, marks=HEAVY),
        pytest.param("llama", {"attention": "onnx24"}, marks=HEAVY),
        ("lfm2", {}),
        pytest.param("mamba", {}, marks=HEAVY),
        pytest.param("llama", {"attention": "gqa", "static_shapes": True, "prefill_chunk": 6}, marks=HEAVY),
        pytest.param("bloom", {"cache": "growing"}, marks=HEAVY),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "auto",
)
def test_batched_rows_match_individual_runs(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    folder = exported(tiny_checkpoint(kind, **more), batch_size=2, **options)
    rows = rows_of(14, 288, 24)
    with opened(folder) as engine:
        together = answered(engine, rows)
        alone = [answered(engine, [InputRow(0, row.data)])[0] for row in rows]
        shuffled = [rows[place] for place in random.Random(5).sample(range(len(rows)), len(rows))]
        again = answered(engine, shuffled)
    assert [row["id"] for row in together] == [f"r{index}" for index in range(len(rows))]
    assert again == together, "nor does it matter which rows come when"
    greedy = [index for index in range(len(rows)) if index % 4 != 3]
    assert [together[index]["tokens"] for index in greedy] == [alone[index]["tokens"] for index in greedy]
    assert len({tuple(row["tokens"]) for row in together}) > len(rows) // 2, "the rows differ"


def test_row_errors_do_not_stop_other_rows(tmp_path):
    rows = [
        InputRow(0, {"tokens": [3, 4]}),
        InputRow(1, {"tokens": [], "id": "empty"}),
        InputRow(2, error="line 3 is not JSON"),
        InputRow(3, {"tokens": [1] * 49}),
        InputRow(4, {"tokens": [1] * 40, "max_new_tokens": 30}),
        InputRow(5, {"tokens": [9]}),
        InputRow(6, {"tokens": [1] * 48}),
    ]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        found = answered(engine, rows)
    ends = ["length", "error", "error", "error", "cache_full", "length", "error"]
    assert [row["finish_reason"] for row in found] == ends
    assert "48 tokens, but the cache length is 48, which leaves no room for new tokens" in found[6]["error"]
    assert found[0]["tokens"] == known_tokens([3, 4], 9, ALL) and found[5]["tokens"] == known_tokens([9], 9, ALL)
    assert [row["id"] for row in found[:2]] == [None, "empty"]
    assert "empty" in found[1]["error"] and found[2]["error"] == "line 3 is not JSON"
    assert "49 tokens, but the cache length is 48" in found[3]["error"] and found[4]["error"] is None


class File:
    """A prompt file of token ids, and the run over it."""

    def __init__(self, folder: Path, count: int = 9) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        rows = [{"tokens": [index + 1], "max_new_tokens": 2 + index} for index in range(count)]
        self.text = "".join(json.dumps(row) + "\n" for row in rows)
        self.source.write_text(self.text)
        self.expected = [known_tokens([n + 1], 2 + n, ALL) for n in range(count)]

    def run(self, engine: LocalEngine, heard: Any = lambda _: None) -> BatchRunResult:
        engine.open(BatchOptions())
        return run_file(
            scan_file(self.source),
            self.out,
            lambda rows, defaults: run_rows(rows, defaults, engine, None, engine.manifest.graph.vocab_size),
            DEFAULTS,
            package="package",
            options={},
            on_progress=heard,
        )

    def check(self) -> None:
        found = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert [row["tokens"] for row in found] == self.expected


def test_provider_error_stops_run_and_next_run_resumes(tmp_path, monkeypatch):
    file = File(tmp_path)
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        real, steps = Binding.run, [0]

        def fails_late(binding: Binding) -> None:
            steps[0] += 1
            if steps[0] == 8:
                raise ProviderError("the device is gone")
            real(binding)

        monkeypatch.setattr(Binding, "run", fails_late)
        with pytest.raises(ProviderError, match="the device is gone"):
            file.run(engine)
        done = file.run(engine)
    assert 0 < done.resumed < 9 and done.errors == 0
    file.check()


@pytest.mark.parametrize("change", ["grows", "other rows", "removed"])
def test_input_change_during_run_prevents_output(tmp_path, change):
    file = File(tmp_path)

    def changes(progress: Any) -> None:
        if progress.done == 2:
            if change == "removed":
                file.source.unlink(missing_ok=True)
            else:
                file.source.write_text(file.text + file.text if change == "grows" else file.text.replace("1", "3"))
                os.utime(file.source, ns=(0, 0))

    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        with pytest.raises(GenerationError, match=r"in\.jsonl: changed during .*out\.jsonl\.partial"):
            file.run(engine, changes)
        assert not file.out.exists()
        file.source.write_text(file.text)
        assert file.run(engine).resumed >= 2
    file.check()


def test_rows_without_response_are_named_and_rerun(tmp_path):
    file = File(tmp_path)

    def some(rows: Iterator[InputRow], _: RowDefaults) -> Iterator[AnswerRow]:
        return (AnswerRow(row.index, None, None, (1,), 1, "stop", None, None) for row in rows if row.index != 4)

    with pytest.raises(GenerationError, match=r"no answer to 1 row \(4\)"):
        run_file(scan_file(file.source), file.out, some, DEFAULTS, package="package", options={})
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        assert file.run(engine).resumed == 8


def test_input_read_ahead_is_bounded(tmp_path):
    read = 0

    def rows() -> Iterator[InputRow]:
        nonlocal read
        for read in range(1, 301):
            yield InputRow(read - 1, {"tokens": [read % 60 + 1], "max_new_tokens": 1})

    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        for count, _ in enumerate(run_rows(rows(), DEFAULTS, engine, None, 64), start=1):
            assert read - count <= AHEAD + 2 * engine.slots
    assert count == read == 300
