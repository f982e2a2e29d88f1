"""Limits for the output growth of a tokenizer, checked in tokenizer.json before it is loaded.

The tokenizers library aborts the process when memory runs out, even while it loads added tokens.
"""

from __future__ import annotations

import base64
import gc
import json
import re
from pathlib import Path
from typing import Any

from partita.untrusted_files import read_capped

LIMITS = {"normalizer": 1 << 16, "pre_tokenizer": 1 << 6, "post_processor": 1 << 12, "decoder": 1 << 18}
"""Maximum growth of the text in each component; for a decoder, maximum bytes of one token."""
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4, "CTC": 3}
"""Growth of types without settings (Unicode FAQ, "Normalization")."""
REPEATED_GROUP = re.compile(r"\)[*+{]")
"""A repeated group in a regular expression, which can take exponential time."""
UTF8_BYTES = 4
"""Maximum bytes of a character."""


def load_full(folder: Path) -> tuple[Any, int]:
    """The tokenizer from transformers and its `growth_of`. Remote code is not run.

    Raises ValueError for a tokenizer beyond the limits, and exceptions of transformers.
    """
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    growth = growth_of(read_capped(file)) if file.is_file() else 0
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not growth and hasattr(tokenizer, "backend_tokenizer"):
        growth = growth_of(tokenizer.backend_tokenizer.to_str())
    return tokenizer, max(growth, 1)


def growth_of(text: str) -> int:
    """Upper bound of the bytes that a tokenizer.json makes of one byte of text before the vocabulary lookup.

    Raises ValueError for a file that is damaged, or a tokenizer beyond the limits.
    """
    collects = gc.isenabled()
    gc.disable()  # collection would double the time: a vocabulary is hundreds of thousands of objects
    try:
        file = json.loads(text, object_pairs_hook=_unique)
        found = {name: _growth(file.get(name)) for name in LIMITS}
        vocabulary = [*file["model"].get("vocab", ()), *(token["content"] for token in file.get("added_tokens") or ())]
        found["decoder"] *= UTF8_BYTES * max(len(word if isinstance(word, str) else word[0]) for word in vocabulary)
    except RecursionError as error:
        raise ValueError("tokenizer.json is nested too deeply") from error
    finally:
        if collects:
            gc.enable()
    if REPEATED_GROUP.search(json.dumps(file.get("decoder"))):  # only encoding has a time limit
        raise ValueError("its decoder has a regular expression that repeats a group")
    for name, most in LIMITS.items():
        if found[name] > most:
            raise ValueError(f"its {name} can lengthen text more than {most:,} times")
    return found["normalizer"] * found["pre_tokenizer"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which the tokenizers library may use the other value."""
    found = dict(pairs)
    if len(found) != len(pairs) and ("type" in found or "model" in found):
        raise ValueError("tokenizer.json has a key twice in one object")
    return found


def _growth(part: Any) -> int:
    """Growth of a text by a component and its parts, capped above the limits."""
    if not isinstance(part, dict):
        return 1
    # A regex that matches the empty text inserts it before every character and at the end.
    written = max(
        len(str(part.get(name, "")).encode("utf-8", "replace")) for name in ("content", "prepend", "replacement")
    )
    product = max(1 + 2 * written, GROWTH.get(str(part.get("type")), 1))
    pattern = part.get("pattern")
    if part.get("type") == "Replace" and isinstance(pattern, dict) and pattern.get("String"):
        product = max(1, -(-written // len(str(pattern["String"]).encode("utf-8", "replace"))))
    if "precompiled_charsmap" in part:  # a SentencePiece table ends with its replacements, each null-terminated
        table = base64.b64decode(part["precompiled_charsmap"] or "")
        product = max(map(len, table[UTF8_BYTES + int.from_bytes(table[:4], "little") :].split(b"\0")), default=1)
    if "single" in part:  # the pieces of a template: the text, or special tokens of some ids
        ids = [
            part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            for piece in part["single"]
            if "SpecialToken" in piece
        ]
        product = len(part["single"]) + sum(map(len, ids))
    for inner in (each for value in part.values() if isinstance(value, list) for each in value):
        product = min(max(product, 1) * _growth(inner), 1 << 40)
    return product
