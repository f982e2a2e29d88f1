"""Scheduler requests, prefixes and adapters of rows in the Python API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita
from partita.errors import GenerationError, UsageError
from partita.library.engine.requests import Work
from partita.library.sampling import Sampling
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens


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


# Adapters by row, in handmade packages whose states all depend on the adapter of the row


RANKS = {"loud": 3, "small": 1}
BEGINNING = tuple((7 * i + 3) % VOCAB for i in range(20))
ASKED: list[tuple[tuple[int, ...], str | None]] = [
    ((*BEGINNING, 9, 4), "loud"),
    ((*BEGINNING, 9, 4), None),
    ((*BEGINNING, 9, 4), "small"),
    ((*BEGINNING, 2), "loud"),
    ((*BEGINNING, 2), None),
    ((5,), "small"),
    ((*BEGINNING, 7, 7, 1), "small"),
    ((*BEGINNING, 9, 4), "loud"),
]
"""Most of them begin alike, so that states are copied from row to row."""
Opened = Callable[..., Any]


def known(prompt: tuple[int, ...], name: str | None, count: int = 5, states: Any = ALL) -> tuple[int, ...]:
    return tuple(known_tokens(prompt, count, states, None if name is None else (name, RANKS[name])))


TOGETHER: list[dict[str, Any]] = [{}, {"shapes": "pair"}]
APART: list[dict[str, Any]] = [{}, {"fewer": True}, {"shapes": "one"}, {"shapes": "pair"}]


@pytest.mark.parametrize("states", [("key",), ALL], ids=["keys", "states"])
@pytest.mark.parametrize(
    ("batch", "apart", "options"),
    [*((3, True, each) for each in APART), *((batch, False, each) for batch in (1, 3) for each in TOGETHER)],
    ids=str,
)
def test_requests_with_different_adapters_match_individual_runs(
    tmp_path: Path, opened: Opened, states: Any, batch: int, apart: bool, options: Any
) -> None:
    folder = handmade(tmp_path / "p", batch=batch, states=states, adapters=RANKS, apart=apart, **options)
    assert read_manifest(folder).graph.adapters_by_row == apart
    steps: list[Any] = []
    scheduler = opened(folder)
    asked = [Work(prompt, Sampling(temperature=0.0, max_new_tokens=5), adapter=name) for prompt, name in ASKED]
    tickets = [scheduler.submit(work, None, steps.append) for work in asked]
    beside = set[int]()
    while scheduler.step():
        beside.add(len({ticket.work.adapter for ticket in tickets if ticket.state == "running"}))
    assert [ticket.result.tokens for ticket in tickets] == [known(*each, states=states) for each in ASKED]
    assert max(beside) == (3 if apart else 1), "as many adapters beside each other as there are rows"
    if batch > 1 and states != ALL:
        assert any(step.prefix_tokens for step in steps), "what begins alike is read once, with the same adapter"
    assert len({known(ASKED[0][0], name) for name in (None, *RANKS)}) == 3, "the adapters make no difference"


@pytest.mark.parametrize("shapes", ["any", "pair"])
def test_generate_accepts_an_adapter_per_prompt(tmp_path: Path, shapes: str) -> None:
    folder = handmade(tmp_path / "p", batch=3, shapes=shapes, adapters=RANKS)
    names = ["loud", None, "small"]
    prompts = [(*BEGINNING, 9, 4), (*BEGINNING, 9, 4), (*BEGINNING, 9, 5)]
    with partita.load(folder, providers="cpu", threads=1) as model:
        for given in (names, tuple(names), names[::-1], "small", None):
            each = [given] * 3 if given is None or isinstance(given, str) else given
            found = model.generate(prompts, max_new_tokens=5, adapter=given).run().tokens
            assert found == tuple(known(prompt, name) for prompt, name in zip(prompts, each, strict=True)), given
        model.generate(prompts, max_new_tokens=2, adapter=names).run()
        assert model.report(probe_seconds=0).request.options["adapter"] == "loud / none / small"
        with pytest.raises(UsageError, match=r"`adapter=other`: .* choose one of loud, small"):
            model.generate(prompts, adapter=["loud", "other", None])
        with pytest.raises(UsageError, match="`adapter` has 2 entries for 3 prompts; pass a name or None for each"):
            model.generate(prompts, adapter=["loud", None])


def test_prefix_requires_the_adapter_it_was_saved_with(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "p", batch=2, states=("key",), adapters=RANKS)
    file, prompts = tmp_path / "prefix", [(9, 4), (2,)]
    with partita.load(folder, providers="cpu", threads=1) as model:
        model.save_prefix(file, list(BEGINNING), adapter="loud")
        found = model.generate(prompts, max_new_tokens=4, adapter=["loud", "loud"], prefix=file).run().tokens
        assert found == tuple(known((*BEGINNING, *prompt), "loud", 4, ("key",)) for prompt in prompts)
        with pytest.raises(GenerationError, match="saved with adapter loud, but this run uses adapter small"):
            model.generate(prompts, adapter="small", prefix=file)
        with pytest.raises(UsageError, match="was saved with one adapter or none, but the prompts use several"):
            model.generate(prompts, adapter=["loud", None], prefix=file)
