"""Requests for a scheduler, made by a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import partita
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Any:
    with partita.load(exported(tiny_checkpoint("llama"), batch_size=2, attention="onnx24"), "cpu") as loaded:
        yield loaded


def test_requests_are_answered_as_generate_answers(model: partita.Model) -> None:
    prompts: list[Any] = [[5, 6, 7], np.array([9, 8]), (3,)]
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.7, "seed": 4}
    each = [partita.Sampling(**options), partita.Sampling(max_new_tokens=6)]
    alone = []
    for prompt in prompts:
        done = model.generate([[*prompt], [1]], sampling=each, stop_token_ids=[]).run()
        alone.append(done.answers[0].tokens)
    scheduler, heard = model.scheduler(), dict[int, list[int]]()

    def hear(ticket: partita.Ticket, piece: partita.RequestOutput) -> None:
        heard.setdefault(ticket.number, []).extend(piece.tokens)

    asked = [partita.request(model, prompt, **options, stop_token_ids=[], logprobs=1) for prompt in prompts]
    tickets = [scheduler.submit(work, hear) for work in asked]
    while scheduler.step():
        pass
    assert [ticket.answer.tokens for ticket in tickets] == alone
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
def test_what_cannot_be_asked_is_named(model: partita.Model, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(partita.PartitaError, match=said):
        partita.request(model, **arguments)


def test_what_the_batch_cannot_take_is_an_error_of_submit(model: partita.Model) -> None:
    scheduler = model.scheduler()
    with pytest.raises(partita.GenerationError, match="the prompt"):
        scheduler.submit(partita.request(model, [10**6]))
    with pytest.raises(partita.UsageError, match="^`logprobs=-1`|^`logprobs` is -1"):
        scheduler.submit(partita.request(model, [1], logprobs=-1))
    with pytest.raises(partita.UsageError, match="^`adapter=nosuch`: the package has no adapter"):
        scheduler.submit(partita.request(model, [1], adapter="nosuch"))
    text: Any = "Return the"
    with pytest.raises(partita.UsageError, match=r"submit\(\) got a str; create a request with partita.request"):
        scheduler.submit(text)
