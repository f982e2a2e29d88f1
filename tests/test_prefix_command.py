"""`partita generate --save-prefix` and `--prefix`: the same answer as of the whole text, and only the rest is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from partita.cli import run
from partita.library.chain import ChainOptions
from partita.library.engine import GenerateRequest, PrefixRequest, RowRequest
from partita.library.remote import RemoteEngine
from partita.library.sampling import Sampling
from partita.runtime.prefix_file import SCHEMA, read_said
from tests.conftest import Exported, TinyCheckpoint

OPTIMUM = Path(__file__).parent / "foreign" / "samples" / "optimum"
BEGIN, REST, SYSTEM = "return the value of the", " item in the list", "return the item"


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


def test_a_prompt_goes_on_with_the_text_of_a_prefix(package, kept, capsys):
    wanted = tokens(capsys, package, BEGIN + REST)
    assert tokens(capsys, package, REST, "--prefix", kept) == wanted
    assert generate(package, REST, "--prefix", kept, "-n", 2) == 0
    err = capsys.readouterr().err
    count = len(read_said(kept).tokens)
    assert count > 3 and f"{count} tokens of each prompt come from the prefix" in err
    read = re.search(r"prompt (\d+) tokens", err)
    assert read is not None and int(read[1]) <= len(REST)


@pytest.mark.parametrize("rest", ["r", "\n", "", " ", "中"])
def test_what_a_tokenizer_joins_with_what_follows_makes_no_difference(package, kept, capsys, rest):
    assert tokens(capsys, package, rest, "--prefix", kept) == tokens(capsys, package, BEGIN + rest)


def test_a_conversation_goes_on_with_its_system_message(package, tmp_path, capsys):
    file = tmp_path / "system"
    assert generate(package, "--system", SYSTEM, "--save-prefix", file) == 0
    err = capsys.readouterr().err
    assert f"prefix: {file} (" in err and f"partita generate {package} PROMPT --prefix {file}" in err
    wanted = tokens(capsys, package, "hi", "--system", SYSTEM)
    assert tokens(capsys, package, "hi", "--prefix", file) == wanted
    assert tokens(capsys, package, "hi", "--chat", "--prefix", file) == wanted


def test_token_ids_go_on_with_token_ids(package, tmp_path, capsys):
    file = tmp_path / "ids"
    assert generate(package, "5,6,7,8,9", "--token-ids", "--save-prefix", file) == 0
    wanted = tokens(capsys, package, "5,6,7,8,9,10", "--token-ids")
    assert tokens(capsys, package, "10", "--token-ids", "--prefix", file) == wanted


def test_every_row_begins_with_the_prefix(pair, tmp_path, capsys):
    file = tmp_path / "prefix"
    assert generate(pair, BEGIN, "--save-prefix", file) == 0
    wanted = tokens(capsys, pair, BEGIN + REST, BEGIN + " list")
    assert tokens(capsys, pair, REST, " list", "--prefix", file) == wanted


@pytest.mark.parametrize("child", [False, True])
def test_a_folder_of_another_exporter_is_known_by_its_files(tmp_path, capsys, child):
    """Nobody recorded hashes of it."""
    file = tmp_path / "prefix"
    if not child:
        assert generate(OPTIMUM, "5,6,7,8,9", "--token-ids", "--save-prefix", file) == 0
        wanted = tokens(capsys, OPTIMUM, "5,6,7,8,9,10", "--token-ids")
        assert tokens(capsys, OPTIMUM, "10", "--token-ids", "--prefix", file) == wanted
        return
    engine = RemoteEngine(OPTIMUM, ChainOptions(provider="cpu", threads=1), observe=False)
    saved = engine.save_prefix(PrefixRequest((5, 6, 7, 8, 9), str(file)))
    assert saved.size_bytes == file.stat().st_size
    row = RowRequest((5, 6, 7, 8, 9, 10), Sampling(temperature=0.0, max_new_tokens=8))
    begun = engine.begin(GenerateRequest((row,), prefix=str(file)))
    step = engine.step(begun.number)
    assert step is not None and step.row_tokens == 1
    engine.close()


def test_a_prefix_of_another_package_is_refused(pair, kept, capsys):
    assert generate(pair, REST, REST, "--prefix", kept) == 1
    err = capsys.readouterr().err
    assert f"{kept}: of another package" in err and f"--save-prefix {kept}" in err


def test_files_that_are_no_prefix_are_refused(package, kept, tmp_path, capsys):
    whole, tensors = kept.read_bytes(), load_file(kept)
    said = {"schema": SCHEMA, "package": "", "said": "{}"}
    short, other = {**tensors, "tokens": tensors["tokens"][:-1]}, {"tokens": np.zeros(0, np.int64)}
    files = {
        "nothing": b"",
        "cut": whole[: len(whole) // 2],
        "text": b"what is this",
        "weights": (package / "known_answer.safetensors").read_bytes(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    save_file(other, tmp_path / "empty", said)
    metadata = _metadata(kept)
    save_file(short, tmp_path / "short", metadata)
    save_file({"tokens": tensors["tokens"]}, tmp_path / "stateless", metadata)
    for name in (*files, "empty", "short", "stateless", "missing"):
        assert generate(package, REST, "--prefix", tmp_path / name) == 1, name
        err = capsys.readouterr().err
        assert err.startswith(f"partita: {tmp_path / name}: no") and err.count("\n") == 1, err


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return dict(opened.metadata())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("a", "b", "--save-prefix", "f"), 2, "--save-prefix keeps one text"),
        (("a", "--system", "b", "--save-prefix", "f"), 2, "--save-prefix keeps one text"),
        (("--save-prefix", "f"), 2, "--save-prefix keeps one text"),
        (("a", "--chat", "--save-prefix", "f"), 2, "give --system in place of --chat"),
        (("a", "--save-prefix", "f", "--json"), 2, "--json cannot be given with it"),
        (("a", "--save-prefix", "f", "--report", "r.json"), 2, "--report cannot be given with it"),
        (("a", "--save-prefix", "f", "--max-copies", "0"), 2, "looks at no limits of placement"),
        (("--input", "f", "--output", "g", "--prefix", "h"), 2, "share what they begin with by themselves"),
        (("--input", "f", "--output", "g", "--save-prefix", "h"), 2, "--input cannot be given with it"),
        (("a", "--system", "b", "--prefix", "f"), 2, "leave out --system"),
        (("", "--save-prefix", "f"), 1, "the prompt is empty"),
        (("a" * 90, "--save-prefix", "f"), 1, "the cache holds 64"),
        (("a b c d e f g h", "--save-prefix", "/dev/full"), 1, "/dev/full: cannot write the prefix: No space left"),
    ],
)
def test_what_makes_no_sense_ends_in_a_line(package, tmp_path, monkeypatch, capsys, words, code, says):
    monkeypatch.chdir(tmp_path)
    assert generate(package, *words) == code
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prefix_says_which_prompts_go_on_with_it(package, kept, tmp_path, capsys):
    assert generate(package, "hi", "--chat", "--prefix", kept) == 2
    assert "no message of the system" in capsys.readouterr().err
    file = tmp_path / "ids"
    assert generate(package, "5,6,7", "--token-ids", "--save-prefix", file) == 0
    assert generate(package, "hi", "--prefix", file) == 2
    assert "give token ids" in capsys.readouterr().err
