"""Whether two packages mean the same by a token id, from their tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.capped import read_json_value

FAST = "tokenizer.json"
OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
"""Files of tokenizers without a `tokenizer.json`, of which one has to be there in both."""
SHOWN = 40


def differing(one: tuple[Path, int], other: tuple[Path, int]) -> str | None:
    """How two vocabularies differ, in words; None when they are the same. Each is given as a folder and how many logits
    the model has, which is often padded.
    """
    first, second = _tokens(one[0]), _tokens(other[0])
    if first is None or second is None:
        return _by_file(one, other)
    for token in sorted(first.keys() | second.keys()):
        if first.get(token) != second.get(token):
            return f"token id {token} is {_shown(second.get(token))} in {other[0]} and {_shown(first.get(token))} here"
    return None


def _shown(text: str | None) -> str:
    return "nothing" if text is None else repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _by_file(one: tuple[Path, int], other: tuple[Path, int]) -> str | None:
    """The same of tokenizers in other files, and of packages without a tokenizer, by the number of tokens."""
    for name in OTHERS:
        files = [folder / name for folder, _ in (one, other)]
        if all(file.is_file() for file in files):
            same = files[0].read_bytes() == files[1].read_bytes()
            return None if same else f"their files {name} differ"
    if one[1] != other[1]:
        return f"{other[1]:,} tokens in {other[0]} and {one[1]:,} here"
    return None


def _tokens(folder: Path) -> Mapping[int, str] | None:
    """Text of every token by id; None without a `tokenizer.json` that has them."""
    try:
        content: Any = read_json_value(folder / FAST)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
            found = {index: str(entry[0]) for index, entry in enumerate(vocabulary)}
        else:
            found = {int(index): str(token) for token, index in vocabulary.items()}
        added = {int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()}
    except (OSError, ValueError, TypeError, KeyError, LookupError, AttributeError):
        return None
    return {**found, **added}
