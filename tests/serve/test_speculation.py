"""Answers of the server are the same with guesses of what follows."""

from __future__ import annotations

import pytest

import partita
from partita import cli
from tests.conftest import Exported, TinyCheckpoint
from tests.serve.test_command import serving

TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):"


def test_guesses_make_no_difference_to_an_answer(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    package = exported(tiny_checkpoint("llama"), attention="gqa", max_length=128)
    with partita.load(package, providers="cpu") as model:
        wanted = model.generate(TEXT, max_new_tokens=24).run().text
    with serving(package, "--speculate", "ngram", "--provider", "cpu") as server:
        body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0}
        told = [server.post(body).json()["choices"][0]["text"] for _ in range(2)]
    assert wanted and told == [wanted, wanted]
    assert cli.run(["serve", str(package), "--speculate", "mind"]) == 2
    assert "--speculate mind: the only value is ngram" in capsys.readouterr().err
