"""The tokenizer beside a graph, as its files describe it; it is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.capped import read_json_value
from partita.inspection.records import TokenizerFacts

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "added_tokens.json",
)
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_of(folder: Path, kind: str | None) -> TokenizerFacts:
    """What lies in the folder. `kind`: what reads it, where a manifest says so."""
    files = tuple(name for name in FILES if (folder / name).is_file())
    told = read_json(folder / "tokenizer.json")
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    model = told.get("model")
    model = model if isinstance(model, dict) else {}
    return TokenizerFacts(
        kind=kind or _kind(files),
        files=files,
        model=model["type"] if isinstance(model.get("type"), str) else None,
        vocabulary=_vocabulary(model, told.get("added_tokens")),
        special={name: token for name in SPECIAL if (token := _token(config.get(name)))},
        chat_template=bool(config.get("chat_template")) or "chat_template.jinja" in files,
    )


def _kind(files: tuple[str, ...]) -> str:
    """What reads such files."""
    if "tokenizer.json" in files:
        return "tokenizers"
    return "transformers" if any(name != "chat_template.jinja" for name in files) else "none"


def _vocabulary(model: Mapping[str, Any], added: Any) -> int | None:
    """Entries of the vocabulary and of what was added to it; None where tokenizer.json has none."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of text and score
        names = {entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    else:
        return None
    extra = (
        {entry.get("content") for entry in added or () if isinstance(entry, dict)} if isinstance(added, list) else set()
    )
    return len(names | extra)


def _token(value: Any) -> str:
    """A special token, which is a text or a record with one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file, or it holds something else."""
    try:
        found = read_json_value(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
