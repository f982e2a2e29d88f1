"""Speculative decoding of a request: checks that need no loaded package, and its fact for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partita.errors import UsageError
from partita.foreign.folder import NO_CHOICE, open_folder
from partita.observations.facts import SpeculationFact
from partita.options.generation import SpeculationOptions
from partita.package.folder import Manifest
from partita.untrusted_files import read_json_value

TOKENIZER = "tokenizer.json"


def speculation_fact(options: SpeculationOptions) -> SpeculationFact | None:
    """The fact for a run; None without speculative decoding."""
    if options.draft is not None:
        return SpeculationFact("draft", Path(options.draft).name)
    return None if options.speculate is None else SpeculationFact(options.speculate)


def check_speculation(folder: Path, manifest: Manifest, options: SpeculationOptions) -> None:
    """Check the options without a session.

    Raises UsageError for two options and for a draft with another vocabulary, PackageError for an invalid draft
    package.
    """
    if options.draft is None:
        return
    if options.speculate is not None:
        raise UsageError(f"`speculate={options.speculate}` and `draft`: set only one of them")
    if manifest.graph.batch_size != 1:
        raise UsageError(
            f"`draft={options.draft}` requires batch size 1, but {folder} has {manifest.graph.batch_size}; "
            "use `speculate=ngram`, or export with `batch_size=1`"
        )
    other = Path(options.draft)
    draft = open_folder(other, NO_CHOICE)
    ours, theirs = _vocabulary(folder), _vocabulary(other)
    if ours is None or theirs is None:  # then their numbers of logits are compared
        ours, theirs = manifest.graph.vocab_size, draft.graph.vocab_size
    if ours != theirs:
        raise UsageError(
            f"`draft={options.draft}`: its vocabulary differs from that of {folder}; "
            "a draft package needs the same tokenizer"
        )


def _vocabulary(folder: Path) -> Any:
    """The tokens of a `tokenizer.json`; None without one that lists them."""
    try:
        content: Any = read_json_value(folder / TOKENIZER)
        added = [(entry["id"], entry["content"]) for entry in content.get("added_tokens") or ()]
        return content["model"]["vocab"], added
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
