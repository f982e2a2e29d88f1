"""Limits for the tokenizer of a checkpoint or package, checked in tokenizer.json before the tokenizer is loaded.

Normalizers, pre-tokenizers, decoders and post-processors can write far more text or tokens than they read, and the
tokenizers library aborts the process when memory runs out, already while it loads added tokens.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.capped import read_capped

MOST_GROWTH = 1 << 16
"""Bytes that a normalizer may make of one. Real ones stay below 1,000, also by the estimate that is made here."""
MOST_SPLIT_GROWTH = 16
MOST_PIECE_BYTES = 1 << 16
"""Text of one token."""
MOST_ADDED_TOKENS = 4096
"""Tokens around a text."""
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4, "CTC": 3}
"""Most bytes that a component makes of one byte; 1 for those that are not listed (UAX #15, tables 9 and 10)."""


def load_full(folder: Path) -> tuple[Any, int]:
    """The tokenizer as transformers loads it, and its growth as `growth_of` has it. No code of the folder is run.

    Raises ValueError for a tokenizer beyond the limits, and what transformers raises.
    """
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    growth = growth_of(read_capped(file)) if file.is_file() else None
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if growth is None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        growth = 1 if backend is None else growth_of(backend.to_str())
    return tokenizer, growth


def growth_of(text: str) -> int:
    """An upper bound of the bytes that the tokenizer of a tokenizer.json makes of one byte before it looks up tokens.

    Raises ValueError for a file that is damaged, or a tokenizer beyond the limits.
    """
    collects = gc.isenabled()
    gc.disable()  # a vocabulary is hundreds of thousands of objects: collecting takes twice the time of reading
    try:
        found = json.loads(text, object_pairs_hook=_unique)
        return _checked(found if isinstance(found, dict) else {})
    except RecursionError as error:
        raise ValueError("tokenizer.json is nested too deeply") from error
    finally:
        if collects:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a key that is there twice, the tokenizers library may take the other value."""
    found = dict(pairs)
    if len(found) != len(pairs) and ("type" in found or "model" in found):
        raise ValueError("tokenizer.json has a key twice in one object")
    return found


def _checked(file: Mapping[str, Any]) -> int:
    model = file["model"] if isinstance(file.get("model"), dict) else {}
    words = model.get("vocab") or ()
    words = [entry[0] if isinstance(entry, list) and entry else entry for entry in words]
    words += [token.get("content") for token in file.get("added_tokens") or () if isinstance(token, dict)]
    longest = max((len(word) for word in words if isinstance(word, str)), default=0) * 4
    normalized, split = _growth(file.get("normalizer")), _growth(file.get("pre_tokenizer"))
    affix = max(_bytes(model.get(name)) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    for what, size, most in (
        ("normalizer makes more than {:,} bytes of one byte", normalized, MOST_GROWTH),
        ("pre-tokenizer makes more than {:,} bytes of one byte", split, MOST_SPLIT_GROWTH),
        ("decoder makes more than {:,} bytes of one token", longest * _growth(file.get("decoder")), MOST_PIECE_BYTES),
        ("subword prefix or suffix has more than {:,} bytes", affix, MOST_PIECE_BYTES),
        ("post-processor adds more than {:,} tokens to a text", _added(file.get("post_processor")), MOST_ADDED_TOKENS),
    ):
        if size > most:
            raise ValueError(f"its {what.format(most)}, which is the limit")
    return normalized * split


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _growth(part: Any) -> int:
    """Most bytes that a component makes of one byte; not much above the limits, however large it is."""
    if not isinstance(part, dict):
        return 1
    kind, product = part.get("type"), GROWTH.get(str(part.get("type")), 1)
    if kind == "Replace":
        pattern = part.get("pattern")
        found = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        written = _bytes(part.get("content"))
        product = -(-written // found) if found else 1 + 2 * written  # a regex may match the empty text everywhere
    elif kind == "Prepend":
        product = 1 + _bytes(part.get("prepend"))
    elif kind == "Metaspace":
        product = 2 * _bytes(part.get("replacement"))
    elif kind == "Precompiled":  # SentencePiece's table ends with the texts that it writes, each with a zero byte
        import base64

        table = base64.b64decode(str(part.get("precompiled_charsmap") or ""))
        product = max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    for inner in (each for value in part.values() if isinstance(value, list) for each in value):
        product = min(max(product, 1) * _growth(inner), 1 << 40)
    return max(product, 1)


def _added(part: Any) -> int:
    """Tokens that a post-processor adds; a text that it repeats counts as more than the limit."""
    if not isinstance(part, dict):
        return 0
    if part.get("type") == "Sequence":
        return sum(map(_added, part.get("processors") or ()))
    texts, count = 0, 2  # of RoBERTa and BERT
    known = part.get("special_tokens")
    for piece in part.get("single") or () if part.get("type") == "TemplateProcessing" else ():
        texts += "Sequence" in piece
        special = piece.get("SpecialToken", {}).get("id")
        count += len(known[special]["ids"]) if isinstance(known, dict) and special in known else 0
    return count if texts < 2 else MOST_ADDED_TOKENS + 1
