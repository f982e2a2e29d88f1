"""Text files next to a graph: the tokenizer as its files describe it, and the licence by model card or LICENSE file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.capped import read_json_value
from partita.inspection.records import LicenceFacts, TokenizerFacts
from partita.package import inside

TOKENIZER_FILES = (
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
CARDS = ("README.md", "README", "README.txt", "MODEL_CARD.md")
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
MOST_BYTES = 1 << 20
FRONT = re.compile(r"\A\s*---\s*\n(?P<matter>.*?)\n---\s*(\n|\Z)", re.DOTALL)
ENTRY = re.compile(r"^(?P<key>license|license_name|license_link)\s*:\s*(?P<value>\S.*?)\s*$", re.MULTILINE)


def tokenizer_of(folder: Path, kind: str | None) -> TokenizerFacts:
    """The tokenizer in a folder, not loaded. `kind`: its reader by the manifest; None without one."""
    files = tuple(name for name in TOKENIZER_FILES if (folder / name).is_file())
    tokenizer = read_json(folder / "tokenizer.json")
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    if kind is None:
        kind = "transformers" if set(files) - {"chat_template.jinja"} else "none"
        kind = "tokenizers" if "tokenizer.json" in files else kind
    return TokenizerFacts(
        kind=kind,
        files=files,
        model=model["type"] if isinstance(model.get("type"), str) else None,
        vocabulary=_vocabulary(model, tokenizer.get("added_tokens")),
        special={name: token for name in SPECIAL if (token := _token(config.get(name)))},
        chat_template=bool(config.get("chat_template")) or "chat_template.jinja" in files,
    )


def _vocabulary(model: Mapping[str, Any], added: Any) -> int | None:
    """Entries of the vocabulary and of the added tokens; None where tokenizer.json has no vocabulary."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of text and score
        names = {entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    else:
        return None
    entries = added if isinstance(added, list) else ()
    return len(names | {entry.get("content") for entry in entries if isinstance(entry, dict)})


def _token(value: Any) -> str:
    """A special token, which is a text or a record with one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is missing or holds something else."""
    try:
        found = read_json_value(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def licence_of(folder: Path) -> LicenceFacts:
    """The licence by the first model card or licence text that names one."""
    for name in CARDS:
        front = FRONT.match(_text(folder, name))
        found = ENTRY.finditer(front["matter"]) if front is not None else ()
        entries = {entry["key"]: entry["value"].strip("'\"") for entry in found}
        if "license" in entries:
            named = entries.get("license_name") if entries["license"] == "other" else None
            return LicenceFacts(name=named or entries["license"], source=name, link=entries.get("license_link"))
    for name in LICENCES:
        lines = (line.strip(" #*\t") for line in _text(folder, name).splitlines())
        title = next((line[:120] for line in lines if any(letter.isalnum() for letter in line)), "")
        if title:
            return LicenceFacts(name=title, source=name)
    return LicenceFacts(name=None, source=f"no licence in {CARDS[0]}, and no {LICENCES[0]} file")


def _text(folder: Path, name: str) -> str:
    """The beginning of a text file; empty when it cannot be read. Raises PackageError for a file outside the folder."""
    try:
        with inside(folder, name).open("rb") as stream:
            return stream.read(MOST_BYTES).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""
