"""Safe reading of untrusted files: regular files inside their folder, limits of size and of a tokenizer's output."""

from __future__ import annotations

import base64
import errno
import gc
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeGuard

LARGEST_BYTES = 128 << 20
"""Limit of a text file of a model, and of a journal line. The largest known tokenizer.json has 33 MB (Gemma 3)."""
LARGEST_REPORT_BYTES = 256 << 20
"""Limit of a report or another record that Partita writes."""
MOST_BYTES = 1 << 50
"""Effectively no limit, for files that are mapped into memory."""
LARGEST_INTEGER = (1 << 64) - 1
OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths of open file descriptors of this process."""
KINDS = {"d": "a folder", "p": "a FIFO", "s": "a socket"}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def irregular(path: Path, folder: Path) -> str:
    """Why a file of a model folder must not be opened; empty if it may be opened or does not exist.

    Allowed are regular files in the folder, and links to such files or to blobs of the Hugging Face cache in which the
    folder is a snapshot. Raises OSError.
    """
    if not os.path.lexists(path):
        return ""
    if path.is_symlink() and not path.exists():
        return f"a broken symbolic link to {path.readlink()}"
    # Not Path.resolve, which raises RuntimeError for link loops.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not target.is_relative_to(home) and not _is_blob(target, home):
        return f"a link out of the folder, to {target}"
    return kind_of(path)


def kind_of(path: Path) -> str:
    """The kind of a path that is not a regular file; empty for a regular file."""
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else f"{KINDS.get(stat.filemode(mode)[0], 'a device')}, not a regular file"


def read_capped(path: Path, limit: int = LARGEST_BYTES, *, stream: bool = False) -> str:
    """The UTF-8 text of a regular file. Raises OSError, and ValueError for a file that is too large or not UTF-8.

    `stream`: an open pipe is allowed, too (/dev/stdin, /dev/fd/63), because the user named the path.
    """
    pipe = stream and str(path).startswith(OPEN)
    if not pipe:
        check_size(path, limit)
    with path.open("rb") as file:
        data = file.read(limit + 1 if pipe else -1)  # a size makes Python allocate it
    if len(data) > limit:
        raise ValueError(f"larger than the limit of {limit:,} bytes")
    return data.decode("utf-8")


def read_json_value(path: Path) -> Any:
    """The JSON value in a file. Raises OSError, and ValueError for a file that is too large or not JSON."""
    return parse_json(read_capped(path))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON and for nesting beyond Python's recursion limit."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parsed_record(text: str) -> Any:
    """The value of a JSON text that Partita wrote.

    Raises ValueError for invalid JSON, integers of more than 64 bits, and lone surrogates.
    """
    value = parse_json(text)
    json.loads(text, parse_int=_integer)
    if SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it contains a lone surrogate") from error
    return value


def _integer(digits: str) -> int:
    if abs(value := int(digits)) > LARGEST_INTEGER:
        raise ValueError("it contains an integer of more than 64 bits")
    return value


def check_size(path: Path, limit: int = LARGEST_BYTES) -> None:
    """Raise ValueError for a file above the limit and OSError for a path that is not a regular file."""
    if reason := kind_of(path):
        raise OSError(errno.EINVAL, reason, str(path))
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{size:,} bytes, above the limit of {limit:,} bytes")


def _is_blob(target: Path, folder: Path) -> bool:
    """Whether a file is a blob of the Hugging Face cache of `folder`, whose `snapshots/REVISION` links into `blobs`."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number that fits a float; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


# Tokenizers: the tokenizers library aborts the process when memory runs out, even while it loads added tokens.

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
