"""What a token reads like among others, which is not how a tokenizer decodes it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.errors import GenerationError
from partita.runtime.generate.text.tokens import PlainTokenizer, Text


def tokenizer(folder: Path, model: dict[str, object], **others: object) -> Text:
    kept: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    kept |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **others}
    (folder / "tokenizer.json").write_text(json.dumps(kept))
    return Text(PlainTokenizer(folder), folder, None)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    """Of the kind that drops a space at the beginning."""
    vocab = {"<s>": 0, "\u2581true": 1, "true": 2, "\u2581": 3, "<0xC3>": 4, "<0xA9>": 5}
    special = {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return tokenizer(
        tmp_path,
        {"type": "WordLevel", "vocab": vocab, "unk_token": "<s>"},
        decoder=decoder,
        added_tokens=[{**special, "normalized": False, "special": True}],
    )


def test_a_token_has_its_space_and_a_special_one_its_name(text):
    assert text.decode_at_once([1]) == text.decode_at_once([2]) == "true"
    assert [text.token_text(token) for token in (1, 2, 3, 0)] == [" true", "true", " ", "<s>"]
    assert "\ufffd" in text.token_text(4) and "\ufffd" in text.token_text(5)


def test_a_text_that_a_vocabulary_cannot_say_is_an_error_of_the_prompt(tmp_path):
    """The tokenizer raises a plain exception there, which would end a run over a file."""
    text = tokenizer(tmp_path, {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"})
    assert text.encode("a") == [0]
    with pytest.raises(GenerationError, match="the tokenizer cannot encode this text"):
        text.encode("b")
