"""Limits for the tokenizer of a checkpoint or package, checked in tokenizer.json before the tokenizer is loaded.

Its components can write far more than they read, and the tokenizers library aborts the process when memory runs out,
already while it loads added tokens.
"""

from __future__ import annotations

import base64
import gc
import json
import re
from pathlib import Path
from typing import Any

from partita.capped import read_capped

LIMITS = {"normalizer": 1 << 16, "pre_tokenizer": 1 << 6, "post_processor": 1 << 12, "decoder": 1 << 18}
"""How much longer a component may make what it is given; a decoder, the bytes of one token."""
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4, "CTC": 3}
"""The same for types whose settings do not tell (Unicode FAQ, "Normalization")."""
REPEATED_GROUP = re.compile(r"\)[*+{]")
"""In a regular expression: it may try a text in more ways than can be waited for."""
UTF8_BYTES = 4
"""Of a character, at most."""


def load_full(folder: Path) -> tuple[Any, int]:
    """The tokenizer as transformers loads it, and its growth as `growth_of` has it. No code of the folder is run.

    Raises ValueError for a tokenizer beyond the limits, and what transformers raises.
    """
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    growth = growth_of(read_capped(file)) if file.is_file() else 0
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not growth and hasattr(tokenizer, "backend_tokenizer"):
        growth = growth_of(tokenizer.backend_tokenizer.to_str())
    return tokenizer, max(growth, 1)


def growth_of(text: str) -> int:
    """An upper bound of the bytes that the tokenizer of a tokenizer.json makes of one byte before it looks up tokens.

    Raises ValueError for a file that is damaged, or a tokenizer beyond the limits.
    """
    collects = gc.isenabled()
    gc.disable()  # collecting would take as long as reading: a vocabulary is hundreds of thousands of objects
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
    if REPEATED_GROUP.search(json.dumps(file.get("decoder"))):  # a text is encoded with a limit of time, not decoded
        raise ValueError("its decoder has a regular expression that repeats a group")
    for name, most in LIMITS.items():
        if found[name] > most:
            raise ValueError(f"its {name} can make what it is given more than {most:,} times as long")
    return found["normalizer"] * found["pre_tokenizer"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a key that is there twice, the tokenizers library may take the other value."""
    found = dict(pairs)
    if len(found) != len(pairs) and ("type" in found or "model" in found):
        raise ValueError("tokenizer.json has a key twice in one object")
    return found


def _growth(part: Any) -> int:
    """How much longer a component and those in it can make a text; not much above the limits, however large it is."""
    if not isinstance(part, dict):
        return 1
    # Written at most in front of every character and behind the last one, by a regex that matches the empty text.
    written = max(
        len(str(part.get(name, "")).encode("utf-8", "replace")) for name in ("content", "prepend", "replacement")
    )
    product = max(1 + 2 * written, GROWTH.get(str(part.get("type")), 1))
    pattern = part.get("pattern")
    if part.get("type") == "Replace" and isinstance(pattern, dict) and pattern.get("String"):
        product = max(1, -(-written // len(str(pattern["String"]).encode("utf-8", "replace"))))
    if "precompiled_charsmap" in part:  # a SentencePiece table ends with the texts that it writes, each before a zero
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
