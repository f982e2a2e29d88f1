"""Whether two packages mean the same by a token id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from partita.runtime.speculation.vocabulary import differing

BPE = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 2, "content": "<eos>"}]}
OTHER = {"model": {"vocab": {"a": 0, "c": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}
MORE = {
    "model": {"vocab": {"a": 0, "b": 1}},
    "added_tokens": [{"id": 2, "content": "<eos>"}, {"id": 3, "content": "<x>"}],
}


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (BPE, BPE, None),
        (BPE, UNIGRAM, None),
        (BPE, OTHER, "token id 1 is 'c' in {other} and 'b' here"),
        (BPE, MORE, "token id 3 is '<x>' in {other} and nothing here"),
        (BPE, {"model": 3}, "12 tokens in {other} and 10 here"),
        (None, None, "12 tokens in {other} and 10 here"),
    ],
)
def test_vocabularies_are_compared_token_by_token(tmp_path: Path, one: Any, other: Any, says: str | None) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, content in zip(folders, (one, other), strict=True):
        folder.mkdir()
        if content is not None:
            (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    found = differing((folders[0], 10), (folders[1], 12))
    assert found == (None if says is None else says.format(other=folders[1]))


def test_tokenizers_in_other_files_are_compared_as_they_are(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(b"pieces")
    assert differing((folders[0], 10), (folders[1], 12)) is None, "the number of logits is often padded"
    (folders[1] / "tokenizer.model").write_bytes(b"others")
    assert differing((folders[0], 10), (folders[1], 10)) == "their files tokenizer.model differ"
