"""`partita generate --save-prefix`, `--prefix`, `--speculate`, `--draft`: same text with less computation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.commands.chat import SCHEMA as SCHEMA_OF_CHAT
from partita.commands.chat import Session
from partita.runtime.generate.prefix_file import read_content
from partita.runtime.generate.prefixes import LEAST_TOKENS
from tests.commands.test_chat import piped
from tests.conftest import Exported, TinyCheckpoint
from tests.library.engine.test_speculation import always_draft
from tests.runtime.handmade_packages import VOCAB, handmade, known_tokens

BEGIN, REST, SYSTEM = "return the value of the", " item in the list", "return the item"
LONG = "return the value of the item in the list, and"
IDS = ",".join(str(5 + 3 * index) for index in range(20))


@pytest.fixture(scope="module")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"), attention="gqa")


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """Of batch size 2."""
    return exported(tiny_checkpoint("llama"), attention="gqa", batch_size=2)


@pytest.fixture(scope="module")
def kept(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix of plain text."""
    file = tmp_path_factory.mktemp("prefix") / "begin.safetensors"
    assert generate(package, BEGIN, "--save-prefix", file) == 0
    return file


def generate(*words: object) -> int:
    return run(["generate", *map(str, words), "--provider", "cpu", "--threads", "1"])


def tokens(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[int]]:
    capsys.readouterr()
    assert generate(*words, "-n", 8, "--json") == 0
    return [row["tokens"] for row in json.loads(capsys.readouterr().out)["rows"]]


def test_prompt_continues_text_prefix(package, kept, capsys):
    wanted = tokens(capsys, package, BEGIN + REST)
    assert tokens(capsys, package, REST, "--prefix", kept) == wanted
    assert generate(package, REST, "--prefix", kept, "-n", 2) == 0
    err = capsys.readouterr().err
    count = len(read_content(kept).tokens)
    assert count > 3
    read = re.search(r"prompt (\d+) tokens", err)
    assert read is not None and int(read[1]) <= len(REST)


@pytest.mark.parametrize("rest", ["r", "\n", "", " ", "中"])
def test_tokens_merged_across_prefix_boundary_match_full_prompt(package, kept, capsys, rest):
    assert tokens(capsys, package, rest, "--prefix", kept) == tokens(capsys, package, BEGIN + rest)


def test_system_prefix_matches_system_option(package, tmp_path, capsys):
    file = tmp_path / "system"
    assert generate(package, "--system", SYSTEM, "--save-prefix", file) == 0
    err = capsys.readouterr().err
    assert f"prefix: {file} (" in err and "use it with --prefix" in err
    wanted = tokens(capsys, package, "hi", "--system", SYSTEM)
    assert tokens(capsys, package, "hi", "--prefix", file) == wanted
    assert tokens(capsys, package, "hi", "--chat", "--prefix", file) == wanted


def test_prefix_of_other_package_is_rejected(pair, kept, capsys):
    assert generate(pair, REST, REST, "--prefix", kept) == 1
    err = capsys.readouterr().err
    assert f"{kept}: saved with another package" in err and "save it again with this package" in err
    assert "--save-prefix" not in err, "it cannot be given with --prefix"


def rows_of(tmp_path: Path, package: Path, lines: list[dict[str, Any]], *options: object, code: int = 0) -> list[Any]:
    """The answers to a file of rows."""
    source, output = tmp_path / "rows.jsonl", tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert generate(package, "--input", source, "--output", output, "-n", 8, *options) == code
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if not code else []


@pytest.fixture(scope="module")
def long(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prefixes of as many tokens as are looked after, of each kind."""
    folder = tmp_path_factory.mktemp("long")
    words = {"text": [LONG], "system": ["--system", LONG], "ids": [IDS, "--token-ids"]}
    for kind, given in words.items():
        assert generate(package, *given, "--save-prefix", folder / kind) == 0
        assert len(read_content(folder / kind).tokens) >= LEAST_TOKENS
    return {kind: folder / kind for kind in words}


def test_input_file_rows_continue_prefix(package, long, tmp_path, capsys):
    rests = [REST, "", " and"]
    answers = rows_of(tmp_path, package, [{"prompt": rest} for rest in rests], "--prefix", long["text"])
    assert [row["tokens"] for row in answers] == [tokens(capsys, package, LONG + rest)[0] for rest in rests]
    said: list[dict[str, Any]] = [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}]
    answers = rows_of(tmp_path, package, said, "--prefix", long["system"])
    assert [row["tokens"] for row in answers] == tokens(capsys, package, "hi", "--system", LONG) * 2
    answers = rows_of(tmp_path, package, [{"tokens": [10]}], "--prefix", long["ids"], "--token-ids")
    assert [row["tokens"] for row in answers] == tokens(capsys, package, f"{IDS},10", "--token-ids")


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *words: object) -> int:
    return piped(monkeypatch, text, *map(str, words), "-n", "8")


def test_chat_command_starts_with_system_prefix(package, long, tmp_path, capsys, monkeypatch):
    found: list[int] = []
    answer = Session._answer

    def told(session: Session, message: str) -> int:
        code = answer(session, message)
        assert session.last is not None
        found.append(session.last.prefilled_tokens)
        return code

    monkeypatch.setattr(Session, "_answer", told)
    said = tmp_path / "said.json"
    begins = {"schema": SCHEMA_OF_CHAT, "messages": [{"role": "system", "content": LONG}]}
    said.write_text(json.dumps(begins), encoding="utf-8")
    assert chat(monkeypatch, "hi\n", package, "--system", LONG) == 0
    wanted = capsys.readouterr().out
    assert chat(monkeypatch, "hi\n", package, "--prefix", long["system"]) == 0
    assert capsys.readouterr().out == wanted
    assert found[0] - found[1] == len(read_content(long["system"]).tokens)
    assert chat(monkeypatch, "hi\n", package, "--prefix", long["system"], "--resume", said) == 0
    assert capsys.readouterr().out == wanted and found[2] == found[1]
    for words, code, says in (
        (("--prefix", long["system"], "--system", "a"), 2, "omit --system"),
        (("--prefix", long["text"]), 2, "no system message"),
        (("--prefix", tmp_path / "none"), 1, "not a readable prefix"),
        (("--prefix", said), 1, "not a readable prefix"),
    ):
        assert chat(monkeypatch, "hi\n", package, *words) == code
        assert says in capsys.readouterr().err
    said.write_text(said.read_text().replace(LONG, "another"))
    assert chat(monkeypatch, "hi\n", package, "--prefix", long["system"], "--resume", said) == 2
    assert "does not start with the system message of --prefix" in capsys.readouterr().err


# `--speculate` and `--draft`: the same text, the acceptance, and one line where it cannot be


PROMPT = [(5 * i + 1) % VOCAB for i in range(8)]
N = 30
Generated = Callable[..., tuple[str, str]]


@pytest.fixture
def summing(tmp_path: Path) -> Path:
    return handmade(tmp_path / "package", states=("key",))


@pytest.fixture
def generated(capsys: pytest.CaptureFixture[str], summing: Path) -> Generated:
    """Runs generate; stdout and stderr."""

    def generate(*options: object, folder: Path = summing, code: int = 0) -> tuple[str, str]:
        given = ["generate", folder, ",".join(map(str, PROMPT)), "--token-ids", "-n", N, "--provider", "cpu", *options]
        assert run([str(part) for part in given]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out, captured.err

    return generate


def test_speculative_tokens_match_and_acceptance_is_printed(generated, summing, tmp_path, monkeypatch):
    always_draft(monkeypatch, most=3)
    wanted = known_tokens(PROMPT, N, ("key",))
    for how in (("--speculate", "ngram"), ("--draft", summing)):
        told: dict[str, Any] = json.loads(generated(*how, "--json")[0])
        assert told["rows"][0]["tokens"] == wanted
        assert told["speculation"]["kind"] == ("draft" if "--draft" in how else "ngram")
    out, err = generated("--draft", summing, "--report", tmp_path / "run.json")
    assert [int(token) for token in out.split()] == wanted
    assert " % of " in err and "draft tokens accepted" in err
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert report["speculation"]["drafted"] >= report["speculation"]["accepted"] > 0
    assert report["request"]["options"]["draft"] == str(summing)
    assert json.loads(generated("--json")[0])["speculation"] is None
