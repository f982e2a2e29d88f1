"""Tokenizers that could expand a text excessively are rejected before they are loaded; real tokenizers load."""

from __future__ import annotations

import base64
import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, PackageError
from partita.export.checkpoint.companions import probe_tokenizer
from partita.runtime.generate.text.tokens import TooLongError, load_text
from partita.untrusted_files import growth_of
from tests.conftest import DEMO_CHECKPOINT

DEMO: dict[str, Any] = json.loads((DEMO_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))


def replace(found: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def several(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(pieces: int, ids: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": [1] * ids, "tokens": ["<s>"] * ids}}
    single = [text, *[{"SpecialToken": {"id": "<s>", "type_id": 0}}] * pieces]
    return {"type": "TemplateProcessing", "single": single, "pair": [text, text], "special_tokens": special}


def charsmap(text: bytes) -> dict[str, Any]:
    table = (4).to_bytes(4, "little") + bytes(4) + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
THOUSAND = replace("a", "a" * 1000)
NORMALIZED = {
    "id": 999,
    "content": "aaaa",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "while it loads": (
        {"normalizer": several("normalizers", *[THOUSAND] * 4), "added_tokens": [NORMALIZED]},
        "its normalizer can lengthen text",
    ),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "x" * 50_000_000}}, "its normalizer can lengthen text"),
    "charsmap": ({"normalizer": charsmap(b"x" * 100_000)}, "its normalizer can lengthen text"),
    "decoder": ({"decoder": several("decoders", *[THOUSAND] * 4)}, "its decoder can lengthen text"),
    "slow decoder": (
        {"decoder": several("decoders", {"type": "Fuse"}, replace("(a|aa)+c", "x", "Regex"))},
        "its decoder has a regular expression that repeats a group",
    ),
    "token": ({"added_tokens": [{**NORMALIZED, "content": "q" * 5_000_000}]}, "its decoder can lengthen text"),
    "template": ({"post_processor": template(1000, 10_000)}, "its post_processor can lengthen text"),
    "prefix": ({"model": {**DEMO["model"], "continuing_subword_prefix": "x" * 1_000_000}}, "cannot be loaded"),
}


def save(folder: Path, changes: dict[str, Any]) -> Path:
    file = {**copy.deepcopy(DEMO), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((DEMO_CHECKPOINT / "tokenizer_config.json").read_bytes())
    return folder


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
@pytest.mark.parametrize("name", BOMBS)
def test_tokenizer_beyond_limits_is_rejected_naming_component(name, kind, tmp_path, capfd):
    changes, said = BOMBS[name]
    with pytest.raises(PackageError) as caught:
        load_text(save(tmp_path, changes), kind)
    assert said in str(caught.value) and "panicked" not in capfd.readouterr().err


def test_export_skips_tokenizer_beyond_limits_with_note(tmp_path):
    notes: list[str] = []
    folder = save(tmp_path, BOMBS["while it loads"][0])
    assert probe_tokenizer(folder, ("tokenizer.json", "tokenizer_config.json"), notes) == "transformers"
    assert "its normalizer can lengthen text more than 65,536 times" in notes[0]


def test_duplicate_key_in_tokenizer_is_rejected(tmp_path):
    """The tokenizers library uses the value that is not null."""
    text = (save(tmp_path, BOMBS["while it loads"][0]) / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[:-1] + ', "normalizer": null}')
    with pytest.raises(PackageError, match="a key twice"):
        load_text(tmp_path, "tokenizers")


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 4),
        (
            {
                "normalizer": several("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
                "pre_tokenizer": None,
                "decoder": several(
                    "decoders",
                    replace("▁", " "),
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ),
                "post_processor": template(1, 1),
            },
            49,
        ),
        (
            {
                "normalizer": several(
                    "normalizers",
                    replace("``", '"'),
                    {"type": "NFKD"},
                    {"type": "Lowercase"},
                    replace(" {2,}", " ", "Regex"),
                ),
                "pre_tokenizer": several("pretokenizers", {"type": "WhitespaceSplit"}, METASPACE),
                "decoder": METASPACE,
            },
            50_000,
        ),
    ],
    ids=["byte level", "sentencepiece", "unigram"],
)
def test_real_tokenizers_are_within_limits(changes, most, tmp_path):
    folder = save(tmp_path, changes)
    assert 1 <= growth_of((folder / "tokenizer.json").read_text()) <= most
    text = load_text(folder, "tokenizers", 512)
    assert text.encode("hello world") and text.encode("a long text of words " * 60_000, fits=False)


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
@pytest.mark.parametrize(
    ("changes", "text", "error"),
    [
        ({"normalizer": replace("a", "a" * 10_000)}, "a" * 500_000, "the text is too long"),
        ({"normalizer": {"type": "NFKD"}}, "\ufdfa" * 300_000, "the text is too long"),
        ({"pre_tokenizer": split("(a|aa){20}c")}, "a" * 5_000, "the tokenizer needs more than 1 s"),
        ({"pre_tokenizer": split("(a+)+c")}, "a" * 5_000, "retry-limit-in-match over"),
    ],
)
def test_expensive_text_is_rejected_within_time_and_memory_limits(
    changes, text, error, kind, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("partita.runtime.generate.text.tokens.ENCODE_SECONDS", 1.0)
    loaded = load_text(save(tmp_path, changes), kind, 512)
    began = time.monotonic()
    with pytest.raises(GenerationError, match=error):
        loaded.encode(text)
    assert time.monotonic() - began < 20 and loaded.encode("hello")
    assert capfd.readouterr().err == ""


def test_length_limit_of_text_applies_only_when_fits_is_true(tmp_path):
    """A program can count the tokens of a document before truncating it."""
    text = load_text(save(tmp_path, {}), "tokenizers", 16)
    document = "return the value " * 30_000
    assert len(text.encode(document, fits=False)) > 30_000
    with pytest.raises(
        TooLongError, match="it has 510,000 bytes; the limit is 16 tokens for prompt and completion together"
    ):
        text.encode(document)
