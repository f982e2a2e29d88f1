"""Notes about a loaded package that are not errors, as sentences for a log, a terminal, or a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from partita.library.chain import Target
from partita.library.engine.base import Chunk, OpenedPackage
from partita.observations.records import ChainEntry, remedy_of
from partita.package.folder import Manifest
from partita.package.records import Verification
from partita.providers.resolve import Resolution
from partita.untrusted_files import read_json_value


def not_used(name: str, entry: ChainEntry | Resolution, *, with_remedy: bool = True) -> str:
    """The note on an inactive provider of the chain. `name`: its name in the note."""
    message = f"{name} is not used: {entry.reason}: {entry.evidence}"
    remedy = remedy_of(entry.remedies) if isinstance(entry, ChainEntry) else entry.remedy
    return f"{message}; {remedy}" if with_remedy and remedy is not None else message


def opened_notes(target: Target, opened: OpenedPackage, manifest: Manifest) -> tuple[str, ...]:
    """Notes on an opened package: unused providers of the named chain, providers without nodes, and its model."""
    entries = opened.chain[len(target.skipped) :]
    unused = (
        not_used(provider.name, entry)
        for provider, entry in zip(target.chain, entries, strict=True)
        if entry.status != "active"
    )
    return (
        *unused,
        *opened.notes,
        *map(idle, opened.idle_providers),
        *unverified_note(manifest.verification),
        *inference_notes(manifest),
    )


def idle(name: str) -> str:
    """The note on an active provider without nodes."""
    return f"{name} is in the chain but was assigned no nodes; place shows why"


def inference_notes(manifest: Manifest) -> tuple[str, ...]:
    """Notes on inferred properties of a foreign folder that may be wrong."""
    return () if manifest.foreign is None else manifest.foreign.notes


def unverified_note(verification: Verification, package: str = "this package") -> tuple[str, ...]:
    """A note for a package that was not compared with its model; empty for others."""
    return () if verification.status == "verified" else (f"{package} is unverified: {verification.detail}",)


def chunk_ignored(asked: int | None, chunk: Chunk) -> tuple[str, ...]:
    """A note if the package does not support the requested prefill chunk."""
    if asked is None or asked == chunk.tokens:
        return ()
    reason = (
        "its prefill graph has a fixed size"
        if chunk.is_fixed
        else "its attention processes whole prompts only in a batch"
    )
    given = f"`prefill_chunk={asked}`"
    return (f"{given} is ignored: this package uses {chunk.tokens}, because {reason}",)


def gave_up(reasons: Iterable[str | None]) -> tuple[str, ...]:
    """Notes on rows for which drafting was stopped."""
    given = dict.fromkeys(reason for reason in reasons if reason is not None)
    return tuple(f"speculative decoding is off for the rest of this request ({cause})" for cause in given)


STANDS_FOR = re.compile(r"(image|video|audio|speech)_token_(?:id|index)")
"""Keys of config.json, by transformers' conventions."""


def _placeholders(folder: Path) -> dict[int, str]:
    """Token id -> modality, from config.json; empty if there are none, or it cannot be read."""
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
    """A note on prompts with a placeholder token of an image, a video or audio; None without one."""
    known = _placeholders(folder)
    held = {token for prompt in prompts for token in prompt if token in known}
    if not held:
        return None
    kinds = sorted({known[token] for token in held})
    return (
        f"the prompt has token {', '.join(map(str, sorted(held)))}, a placeholder for {_name_inputs(kinds)}: "
        "this package contains only the text decoder and processes the token as text"
    )


def _name_inputs(kinds: Sequence[str]) -> str:
    return " and ".join({"image": "an image", "video": "a video"}.get(kind, "sound") for kind in kinds)
