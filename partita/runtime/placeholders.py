"""Tokens that stand for an image, a video or sound: a package has the decoder alone, which reads them as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partita.capped import read_json_value

STANDS_FOR = re.compile(r"(image|video|audio|speech)_token_(?:id|index)")
"""Keys of config.json, by transformers' conventions."""


def _placeholders(folder: Path) -> dict[int, str]:
    """Token id -> what it stands for, by config.json; empty where that has no such token, or cannot be read."""
    try:
        config: Any = read_json_value(folder / "config.json")
    except (OSError, ValueError):
        return {}
    found: dict[int, str] = {}
    for part in (config, config.get("thinker_config")) if isinstance(config, dict) else ():
        for key, value in part.items() if isinstance(part, dict) else ():
            known = STANDS_FOR.fullmatch(key)
            if known and isinstance(value, int) and not isinstance(value, bool):
                found[value] = known[1]
    return found


def placeholder_note(folder: Path, prompts: Sequence[Sequence[int]]) -> str | None:
    """What a user has to know of prompts that hold such a token; None when none does."""
    known = _placeholders(folder)
    held = {token for prompt in prompts for token in prompt if token in known}
    if not held:
        return None
    kinds = sorted({known[token] for token in held})
    return (
        f"the prompt holds token {', '.join(map(str, sorted(held)))}, a placeholder for {_listed(kinds)}: this package "
        "has only the text decoder and reads it as text"
    )


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join({"image": "an image", "video": "a video"}.get(kind, "sound") for kind in kinds)
