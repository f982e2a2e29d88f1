"""How a text file that somebody else wrote is read: whole, unless its size is absurd.

The configurations, tokenizers, templates and indices of a model are read into memory before anybody knows what is in
them. The largest tokenizer.json that is known has 33 MB (Gemma 3).
"""

from __future__ import annotations

from pathlib import Path

LARGEST_BYTES = 128 << 20


def read_capped(path: Path) -> str:
    """The text in a file, UTF-8. Raises OSError, and ValueError for one that is too large or no text."""
    check_size(path)
    return path.read_text(encoding="utf-8")


def check_size(path: Path) -> None:
    """Raise ValueError for a text file that is too large, before another library reads it; OSError as it comes."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{size:,} bytes, and a text file of a model has {LARGEST_BYTES:,} at most")
