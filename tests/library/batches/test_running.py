"""Rows through the scheduler into a journal: row by row what each gets alone, in every lowering and kind of state."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, InstallationError, ProviderError
from partita.library.batches.journal import Journal
from partita.library.batches.rows import InputRow, RowDefaults
from partita.library.batches.running import BatchRun
from partita.library.chain import ChainOptions, read_chain_options
from partita.library.local import LocalEngine
from partita.library.sampling import Sampling, completed
from partita.library.scheduler import Scheduler
from partita.package import read_manifest
from partita.runtime.ort.binding import Binding
from partita.runtime.suggested import Suggestion
from tests.conftest import Exported, TinyCheckpoint
from tests.runtime.handmade import ALL, handmade, known_tokens

CPU = read_chain_options(ChainOptions(provider="cpu", threads=1))
DEFAULTS = RowDefaults(completed(Sampling(max_new_tokens=9), Suggestion()), base_seed=11)
HEAVY = pytest.mark.heavy


def opened(folder: Path) -> LocalEngine:
    return LocalEngine(folder, read_manifest(folder), CPU, threads=1, observe=False)


def answers(engine: LocalEngine, rows: list[InputRow], path: Path, defaults: RowDefaults = DEFAULTS) -> list[Any]:
    """What a batch answers; none of it depends on what other rows ask."""
    with Journal(path, {}, defaults.base_seed) as journal:
        BatchRun(Scheduler(engine, None), None, defaults, journal).go(rows)
        return [json.loads(line) for line in journal.answers()]


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
        pytest.param("qwen2", {"attention": "gqa"}, marks=HEAVY),
        pytest.param("gemma2", {"attention": "onnx24"}, marks=HEAVY),
        pytest.param("llama", {"attention": "primitives"}, marks=HEAVY),
        ("llama", {"attention": "onnx24"}),
        pytest.param("qwen2", {"attention": "primitives"}, marks=HEAVY),
        ("lfm2", {}),
        pytest.param("mamba", {}, marks=HEAVY),
        pytest.param("qwen3_next", {}, marks=HEAVY),
        pytest.param("llama", {"attention": "gqa", "static_shapes": True, "prefill_chunk": 6}, marks=HEAVY),
        pytest.param("lfm2", {"static_shapes": True, "prefill_chunk": 6}, marks=HEAVY),
        pytest.param("bloom", {"cache": "growing"}, marks=HEAVY),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "auto",
)
def test_each_row_is_what_it_is_alone(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    folder = exported(tiny_checkpoint(kind, **more), batch_size=2, **options)
    rows = rows_of(14, 288, 24)
    with opened(folder) as engine:
        together = answers(engine, rows, tmp_path / "together")
        alone = [answers(engine, [InputRow(0, row.data)], tmp_path / f"alone-{row.index}")[0] for row in rows]
        shuffled = [rows[place] for place in random.Random(5).sample(range(len(rows)), len(rows))]
        again = answers(engine, shuffled, tmp_path / "again")
    assert [row["id"] for row in together] == [f"r{index}" for index in range(len(rows))]
    assert again == together, "nor does it matter which rows come when"
    greedy = [index for index in range(len(rows)) if index % 4 != 3]
    assert [together[index]["tokens"] for index in greedy] == [alone[index]["tokens"] for index in greedy]
    assert len({tuple(row["tokens"]) for row in together}) > len(rows) // 2, "the rows differ"


def test_errors_of_rows_are_rows_and_the_rest_is_answered(tmp_path):
    rows = [
        InputRow(0, {"tokens": [3, 4]}),
        InputRow(1, {"tokens": [], "id": "empty"}),
        InputRow(2, error="line 3 is not JSON"),
        InputRow(3, {"tokens": [1] * 49}),
        InputRow(4, {"tokens": [1] * 40, "max_new_tokens": 30}),
        InputRow(5, {"tokens": [9], "colour": "red"}),
        InputRow(6, {"tokens": [1] * 48}),
    ]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        found = answers(engine, rows, tmp_path / "out")
    ends = ["length", "error", "error", "error", "cache_full", "length", "error"]
    assert [row["finish_reason"] for row in found] == ends
    assert "48 tokens and the cache holds 48, which leaves no room for an answer" in found[6]["error"]
    assert found[0]["tokens"] == known_tokens([3, 4], 9, ALL) and found[5]["tokens"] == known_tokens([9], 9, ALL)
    assert [row["id"] for row in found[:2]] == [None, "empty"]
    assert "empty" in found[1]["error"] and found[2]["error"] == "line 3 is not JSON"
    assert "49 tokens and the cache holds 48" in found[3]["error"] and found[4]["error"] is None


def test_log_probabilities_are_in_the_rows_that_ask(tmp_path):
    rows = [InputRow(0, {"tokens": [3, 4], "logprobs": 2, "max_new_tokens": 3}), InputRow(1, {"tokens": [3, 4]})]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        first, second = answers(engine, rows, tmp_path / "out")
    assert [entry["token"] for entry in first["logprobs"]] == first["tokens"] and "logprobs" not in second
    assert all(len(entry["top"]) == 2 and entry["top"][0][0] == entry["token"] for entry in first["logprobs"])


def test_an_error_of_the_run_ends_it_and_makes_no_rows(tmp_path, monkeypatch):
    rows = [InputRow(index, {"tokens": [index + 1], "max_new_tokens": 2 + index}) for index in range(9)]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        real, steps = Binding.run, [0]

        def fails_late(binding: Binding) -> None:
            steps[0] += 1
            if steps[0] == 8:
                raise ProviderError("the device is gone")
            real(binding)

        monkeypatch.setattr(Binding, "run", fails_late)
        with pytest.raises(ProviderError, match="the device is gone"):
            answers(engine, rows, tmp_path / "out")
        with Journal(tmp_path / "out", {}, 11) as journal:
            assert 0 < journal.resumed < 9 and journal.errors == 0
        found = answers(engine, rows, tmp_path / "out")
    assert [row["tokens"] for row in found] == [known_tokens([n + 1], 2 + n, ALL) for n in range(9)]


def test_ctrl_c_keeps_what_is_done_and_answers_nothing_by_half(tmp_path):
    rows = [InputRow(index, {"tokens": [index + 1], "max_new_tokens": 3 + index}) for index in range(6)]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        with Journal(tmp_path / "out", {}, 11) as journal:

            def press(run: BatchRun) -> None:
                if len(run.journal) == 2:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                BatchRun(Scheduler(engine, None), None, DEFAULTS, journal, press).go(rows)
            assert len(journal) == 2
        found = answers(engine, rows, tmp_path / "out")
    assert [row["tokens"] for row in found] == [known_tokens([n + 1], 3 + n, ALL) for n in range(6)]


def test_a_row_that_could_not_begin_for_want_of_memory_has_no_answer_and_the_next_run_has(tmp_path, monkeypatch):
    rows = [InputRow(index, {"tokens": [index + 1]}) for index in range(3)]
    with opened(handmade(tmp_path / "p", batch=2)) as engine:
        join, joined = engine.join, list[object]()

        def joins(number: int, request: Any) -> int:
            joined.append(request)
            if len(joined) == 3:
                raise MemoryError("no room")
            return join(number, request)

        monkeypatch.setattr(engine, "join", joins)
        with Journal(tmp_path / "out", {}, 11) as journal, pytest.raises(MemoryError):
            BatchRun(Scheduler(engine, None), None, DEFAULTS, journal).go(rows)
        with Journal(tmp_path / "out", {}, 11) as journal:
            assert 2 not in journal
            BatchRun(Scheduler(engine, None), None, DEFAULTS, journal).go(rows)
            found = [json.loads(line) for line in journal.answers()]
    assert [row["error"] for row in found] == [None] * 3


class Odd:
    """A tokenizer that does not load, once it is to encode; and that has no piece for token 47."""

    def encode(self, prompt: str) -> list[int]:
        raise InstallationError("transformers is not installed")

    def stream(self, prompt: Any = (), stops: Any = (), stop_ids: Any = ()) -> Any:
        if 47 in prompt:
            raise GenerationError("the tokens make no text: IndexError: no such piece")
        return None


def test_a_prompt_that_makes_no_text_is_the_error_of_its_row(tmp_path):
    rows = [InputRow(index, {"tokens": [index + 1, 47 - index]}) for index in range(3)]
    with opened(handmade(tmp_path / "p", batch=2)) as engine, Journal(tmp_path / "out", {}, 11) as journal:
        text: Any = Odd()
        BatchRun(Scheduler(engine, text), text, DEFAULTS, journal).go(rows)
        found = [json.loads(line) for line in journal.answers()]
    assert [row["finish_reason"] for row in found] == ["error", "length", "length"]
    assert "make no text" in found[0]["error"]


def test_what_no_row_would_get_past_ends_the_run_once_those_at_work_have_their_answer(tmp_path):
    given: list[dict[str, Any]] = [{"tokens": [1]}, {"tokens": [2]}, {"prompt": "text"}, {"tokens": [3]}]
    rows = [InputRow(index, data) for index, data in enumerate(given)]
    with opened(handmade(tmp_path / "p", batch=2)) as engine, Journal(tmp_path / "out", {}, 11) as journal:
        text: Any = Odd()
        with pytest.raises(InstallationError, match="transformers is not installed"):
            BatchRun(Scheduler(engine, text), text, DEFAULTS, journal).go(rows)
        assert [index in journal for index in range(4)] == [True, True, False, False]
