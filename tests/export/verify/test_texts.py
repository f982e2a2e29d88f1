"""Calibration and quality texts: unusable texts are rejected with the option and the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.errors import UsageError
from partita.export.checkpoint.companions import probe_tokenizer
from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.quantise import calibration
from partita.export.verify import quality, texts
from partita.export.verify.texts import Text, Tokens, tokens
from tests.conftest import TinyCheckpoint

Reads = Callable[[Path, Checkpoint], Text]
READERS: dict[str, Reads] = {
    "calibrate": lambda path, checkpoint: calibration.read_text(path, checkpoint, 64),
    "quality_text": lambda path, checkpoint: quality.read_text(path, checkpoint, 300, 64, 1 << 20),
}


def test_tokenizer_of_vocab_and_merges_is_loaded(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """An old gpt2 checkpoint; without it, quality would be measured on random tokens."""
    folder = shutil.copytree(tiny_checkpoint("gpt2", tokenizer=False), tmp_path / "gpt2")
    (folder / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    found = tokens("abba", open_checkpoint(str(folder)), 288)
    assert found is not None and found.ids == [3, 2, 1]
    notes: list[str] = []
    assert probe_tokenizer(folder, open_checkpoint(str(folder)).companions(), notes) != "none" and not notes


@pytest.mark.skipif(sys.platform == "win32", reason="no such files there")
@pytest.mark.parametrize("option", READERS)
def test_pipe_as_text_is_rejected(tiny_checkpoint: TinyCheckpoint, tmp_path: Path, option: str) -> None:
    """A pipe can be read only once, and blocks without a writer."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(UsageError, match=rf"`{option}=.*pipe`: not a file; give a text file"):
        READERS[option](pipe, open_checkpoint(str(tiny_checkpoint("llama"))))


@pytest.fixture(scope="module")
def words(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint whose tokenizer knows two words, and has one token for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("words") / "checkpoint"
    shutil.copytree(tiny_checkpoint("llama", tokenizer=False), folder)
    core = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("option", READERS)
def test_unusable_text_is_rejected(words: Checkpoint, tmp_path: Path, option: str) -> None:
    read, path = READERS[option], tmp_path / "text.txt"
    with pytest.raises(UsageError, match=rf"^`{option}={tmp_path}`: not a file; give a text file"):
        read(tmp_path, words)
    path.touch()
    with pytest.raises(UsageError, match=rf"`{option}=.*text\.txt`: too short: 0 tokens; at least"):
        read(path, words)
    path.write_text("drei vier " * 2000)
    with pytest.raises(UsageError, match=rf"`{option}=.*`: the tokenizer does not know ([\d,]+) of its \1 tokens"):
        read(path, words)
    path.write_text("one two three " * 2000)
    assert read(path, words).tokens > 256


def test_bos_token_outside_model_vocabulary_is_omitted(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The embedding has no row for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = shutil.copytree(tiny_checkpoint("llama", tokenizer=False), tmp_path / "begins")
    core = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "<bos>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>").save_pretrained(folder)
    checkpoint = open_checkpoint(str(folder))
    assert tokens("one two", checkpoint, 4) == Tokens([3], [1, 2], 0)
    assert tokens("one two", checkpoint, 3) == Tokens([], [1, 2], 0)


def test_unusable_default_text_is_replaced_with_random_tokens(words: Checkpoint, tmp_path: Path) -> None:
    """As with the tokenizer of a protein model, which knows no word of the default text."""
    path, said = tmp_path / "text.txt", list[str]()
    path.write_text("drei vier " * 2000)
    found = quality.read_text(path, words, 300, 64, 1 << 20, said.append, chosen=False)
    assert found.name == texts.RANDOM and found.tokens > 256
    assert ["has no tokens for the text" in line for line in said] == [True]


def test_large_text_is_truncated_at_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded SHA-256 is that of the whole file."""
    monkeypatch.setattr(texts, "MOST_BYTES", 101)
    path = tmp_path / "text"
    for whole in ("é word " * 40, "é" * 200, "short é"):
        path.write_text(whole)
        found, sha256 = texts.read(path, "calibrate")
        assert whole.startswith(found) and (found == whole) == (len(whole.encode()) <= 101)
        assert len(found.encode()) <= 101
        assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
