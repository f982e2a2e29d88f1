"""`partita generate --speculate` and `--draft`: the same text, what is told of it, and one line where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.errors import ResourceError
from partita.runtime.generate.choice.drafting import DraftModel
from tests.drafts import always_draft, knowing
from tests.runtime.handmade_packages import ALL, VOCAB, handmade, known_tokens

PROMPT = [(5 * i + 1) % VOCAB for i in range(8)]
N = 30
Generated = Callable[..., tuple[str, str]]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return handmade(tmp_path / "package", states=("key",))


@pytest.fixture
def generated(capsys: pytest.CaptureFixture[str], package: Path) -> Generated:
    """Runs generate; stdout and stderr."""

    def generate(*options: object, folder: Path = package, code: int = 0) -> tuple[str, str]:
        given = ["generate", folder, ",".join(map(str, PROMPT)), "--token-ids", "-n", N, "--provider", "cpu", *options]
        assert run([str(part) for part in given]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out, captured.err

    return generate


def test_the_tokens_are_the_same_and_the_acceptance_is_printed(
    generated: Generated, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, most=3)
    wanted = known_tokens(PROMPT, N, ("key",))
    for how in (("--speculate", "ngram"), ("--draft", package)):
        told: dict[str, Any] = json.loads(generated(*how, "--json")[0])
        assert told["rows"][0]["tokens"] == wanted
        assert told["speculation"]["kind"] == ("draft" if "--draft" in how else "ngram")
    out, err = generated("--draft", package, "--report", tmp_path / "run.json")
    assert [int(token) for token in out.split()] == wanted
    assert " % of " in err and "draft tokens accepted" in err
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert report["speculation"]["drafted"] >= report["speculation"]["accepted"] > 0
    assert report["request"]["options"]["draft"] == str(package)
    assert json.loads(generated("--json")[0])["speculation"] is None


@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_of_prompts_has_the_same_completions_with_draft_tokens(
    batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows beside each other too: the last of them goes on alone."""
    always_draft(monkeypatch)
    prompts = [PROMPT[count:] for count in range(3)]
    knowing(monkeypatch, *([*prompt, *known_tokens(prompt, N, ("key",))] for prompt in prompts))
    package = handmade(tmp_path / "rows", batch=batch, states=("key",), appends=batch == 1, fewer=batch > 1)
    rows, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    counts = [N, N - 15, N - 20]
    lines = [{"tokens": prompt, "max_new_tokens": count} for prompt, count in zip(prompts, counts, strict=True)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = []
    for name, how in (("plain", ()), ("fast", ("--speculate", "ngram", "--report", report))):
        out = tmp_path / f"{name}.jsonl"
        given = ["generate", package, "--input", rows, "--output", out, "--token-ids", *how]
        code = run([str(part) for part in (*given, "--provider", "cpu")])
        assert code == 0, capsys.readouterr().err
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        found.append([line.get("tokens", line) for line in lines])
    wanted = [known_tokens(prompt, count, ("key",)) for prompt, count in zip(prompts, counts, strict=True)]
    assert found == [wanted, wanted]
    told = json.loads(report.read_text(encoding="utf-8"))["speculation"]
    assert 0 < told["accepted"] < told["drafted"]


def test_what_cannot_be_is_one_line(generated: Generated, package: Path, tmp_path: Path) -> None:
    recurrent = handmade(tmp_path / "recurrent", states=ALL)
    for options, says in (
        (("--speculate", "tree"), "--speculate tree: the only value is ngram"),
        (("--speculate", "ngram", "--draft", package), "set only one of them"),
        (("--speculate", "ngram"), "cannot be rewound"),
    ):
        _, err = generated(*options, folder=recurrent, code=2)
        assert says in " ".join(err.split())
    _, err = generated("--draft", tmp_path / "nowhere", code=1)
    assert "nowhere" in err
    _, err = generated("--draft", recurrent, code=2)
    assert "this package cannot be a draft package: its conv and recurrent states" in " ".join(err.split())


def test_a_draft_that_gives_up_is_told_once_and_in_the_report(
    generated: Generated, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: DraftModel, history: Any, most: int) -> Any:
        raise ResourceError("no memory for the draft")

    always_draft(monkeypatch)
    monkeypatch.setattr(DraftModel, "__call__", fails)
    out, err = generated("--draft", package, "--report", tmp_path / "run.json")
    assert [int(token) for token in out.split()] == known_tokens(PROMPT, N, ("key",))
    said = " ".join(err.split())
    assert said.count("no memory for the draft") == 1 and "speculative decoding is off" in said
    assert "no memory for the draft" in str(json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["notes"])
