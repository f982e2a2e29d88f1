"""Scheduler requests and prefixes in the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Any:
    with partita.load(exported(tiny_checkpoint("llama"), batch_size=2, attention="onnx24"), "cpu") as loaded:
        yield loaded


def test_scheduler_requests_match_generate(model: partita.Model) -> None:
    prompts: list[Any] = [[5, 6, 7], np.array([9, 8]), (3,)]
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.7, "seed": 4}
    each = [partita.Sampling(**options), partita.Sampling(max_new_tokens=6)]
    alone = []
    for prompt in prompts:
        done = model.generate([[*prompt], [1]], sampling=each, stop_token_ids=[]).run()
        alone.append(done.results[0].tokens)
    scheduler, heard = model.scheduler(), dict[int, list[int]]()

    def hear(ticket: partita.Ticket, piece: partita.RequestOutput) -> None:
        heard.setdefault(ticket.number, []).extend(piece.tokens)

    asked = [partita.request(model, prompt, **options, stop_token_ids=[], logprobs=1) for prompt in prompts]
    tickets = [scheduler.submit(work, hear) for work in asked]
    while scheduler.step():
        pass
    assert [ticket.result.tokens for ticket in tickets] == alone
    assert [tuple(heard[ticket.number]) for ticket in tickets] == alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": [[1], [2]]}, "`prompt` has 2 prompts; make one request for each"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompts is of type int"),
        ({"prompt": [1], "temperature": "hot"}, "temperature"),
        ({"prompt": [1], "sampling": [partita.Sampling()] * 2}, "`sampling` must be a Sampling"),
        ({"prompt": [1], "stop_token_ids": [10**6]}, "stop_token_ids has 1000000"),
        ({"prompt": [1], "max_new_tokens": 0}, "`max_new_tokens` is 0"),
    ],
    ids=str,
)
def test_invalid_request_error_names_argument(model: partita.Model, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(partita.PartitaError, match=said):
        partita.request(model, **arguments)


def test_submit_rejects_invalid_requests(model: partita.Model) -> None:
    scheduler = model.scheduler()
    with pytest.raises(partita.GenerationError, match="the prompt"):
        scheduler.submit(partita.request(model, [10**6]))
    with pytest.raises(partita.UsageError, match="^`logprobs=-1`|^`logprobs` is -1"):
        scheduler.submit(partita.request(model, [1], logprobs=-1))
    with pytest.raises(partita.UsageError, match="^`adapter=nosuch`: .* has no adapter of this name"):
        scheduler.submit(partita.request(model, [1], adapter="nosuch"))
    text: Any = "Return the"
    with pytest.raises(partita.UsageError, match=r"submit\(\) got a str; create a request with partita.request"):
        scheduler.submit(text)


# `model.save_prefix` and `prefix=`: programs have what the command line has


BEGIN, REST, SYSTEM = "return the value of the", " item in", "return the item"


@pytest.mark.parametrize("process", ["this", "child"])
def test_prefix_reduces_prefill_without_changing_tokens(package: Path, tmp_path: Path, process) -> None:
    text, system, ids = (tmp_path / name for name in ("text", "system", "ids"))
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the"}]
    with partita.load(package, providers="cpu", threads=1, process=process, observe=False) as model:
        model.save_prefix(text, BEGIN)
        model.save_prefix(system, system=SYSTEM)
        model.save_prefix(ids, model.encode(BEGIN))
        whole, talk = (model.generate(BEGIN + REST, max_new_tokens=6).run(), model.chat(said, max_new_tokens=6).run())
        for generation, wanted in (
            (model.generate(REST, prefix=text, max_new_tokens=6).run(), whole),
            (model.chat(said, prefix=str(system), max_new_tokens=6).run(), talk),
            (model.generate("the", prefix=system, max_new_tokens=6).run(), talk),
        ):
            assert generation.tokens == wanted.tokens
            assert generation.timings["prompt_tokens"] < wanted.timings["prompt_tokens"]
        rest = model.generate([5, 6], prefix=ids, max_new_tokens=6).run()
        assert rest.tokens == model.generate([*model.encode(BEGIN), 5, 6], max_new_tokens=6).run().tokens


def test_report_of_generation_with_prefix_passes_checks(pair: Path, tmp_path: Path) -> None:
    with partita.load(pair, providers="cpu", threads=1, observe=False) as model:
        model.save_prefix(tmp_path / "prefix", [5, 6, 7, 8, 9, 10])
    with partita.load(pair, providers="cpu", threads=1) as model:
        rows = model.generate([[11, 12], [13]], prefix=tmp_path / "prefix", max_new_tokens=6, stop_token_ids=()).run()
        assert rows.timings["prompt_tokens"] == 3, "the others were not read"
        assert [check for check in model.report().checks if not check.passed] == []


def test_invalid_prefix_arguments_are_rejected(package: Path, tmp_path: Path) -> None:
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        for text, system in ((None, None), ("a", "b")):
            with pytest.raises(partita.ArgumentError, match="a prefix contains one text"):
                model.save_prefix(tmp_path / "f", text, system=system)
        with pytest.raises(partita.ArgumentError, match="inside"):
            model.save_prefix(package / "f", "a")
        with pytest.raises(partita.GenerationError, match="not a readable prefix"):
            model.generate("a", prefix=tmp_path / "f")
        with pytest.raises(partita.GenerationError, match="is empty"):
            model.save_prefix(tmp_path / "f", [])
    assert not list(tmp_path.iterdir())


def test_prefix_with_non_finite_logits_is_not_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        with monkeypatch.context() as patch:
            patch.setattr("partita.runtime.generate.choice.next_tokens.isfinite", lambda value: False)
            with pytest.raises(partita.GenerationError, match="not finite"):
                model.save_prefix(tmp_path / "prefix", BEGIN)
        assert not (tmp_path / "prefix").exists()
        assert model.generate(BEGIN, max_new_tokens=3).run().tokens
