"""Options of speculative decoding, and checks that need no loaded package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from partita.errors import UsageError
from partita.foreign.folder import NO_CHOICE, open_folder
from partita.observations.facts import SpeculationFact
from partita.options.generation import SpeculationOptions
from partita.package.folder import Manifest
from partita.untrusted_files import read_json_value

NGRAM: Literal["ngram"] = "ngram"


@dataclass(frozen=True, slots=True)
class Speculation:
    """The requested speculative decoding. At most one of the two fields is set."""

    speculate: str | None = None
    """`ngram`: lookup in the row's own text."""
    draft: str | None = None
    """Folder of the draft package."""

    @classmethod
    def of(cls, options: SpeculationOptions) -> Self:
        """The speculation of a command's options."""
        return cls(options.speculate, None if options.draft is None else str(options.draft))

    @property
    def as_options(self) -> Mapping[str, str]:
        """The options as a report shows them."""
        given = {"speculate": self.speculate, "draft": self.draft}
        return {name: value for name, value in given.items() if value is not None}

    def fact(self) -> SpeculationFact | None:
        """The fact for a run; None without speculative decoding."""
        if self.draft is not None:
            return SpeculationFact("draft", Path(self.draft).name)
        return SpeculationFact(NGRAM) if self.speculate is not None else None

    def __bool__(self) -> bool:
        return self.speculate is not None or self.draft is not None


NO_SPECULATION = Speculation()


def check_speculation(folder: Path, manifest: Manifest, speculation: Speculation) -> None:
    """Check the options without a session.

    Raises UsageError for an invalid option or a draft with another vocabulary, PackageError for an invalid draft
    package.
    """
    if speculation.speculate not in (None, NGRAM):
        raise UsageError(f"`speculate={speculation.speculate}`: the only value is {NGRAM}; or set `draft` to a package")
    if speculation.draft is None:
        return
    if speculation.speculate is not None:
        raise UsageError(f"`speculate={speculation.speculate}` and `draft`: set only one of them")
    if manifest.graph.batch_size != 1:
        raise UsageError(
            f"`draft={speculation.draft}` requires batch size 1, but {folder} has {manifest.graph.batch_size}; "
            f"use `speculate={NGRAM}`, or export with `batch_size=1`"
        )
    other = Path(speculation.draft)
    draft = open_folder(other, NO_CHOICE)
    found = differing((folder, manifest.graph.vocab_size), (other, draft.graph.vocab_size))
    if found is not None:
        raise UsageError(
            f"`draft={speculation.draft}`: its vocabulary differs from that of {folder}: {found}; "
            "a draft package needs the same tokenizer"
        )


TOKENIZER = "tokenizer.json"
SHOWN = 40


def differing(one: tuple[Path, int], other: tuple[Path, int]) -> str | None:
    """How two vocabularies differ, as text; None if equal. Each is a folder and its number of logits, which counts
    without a `tokenizer.json`."""
    first, second = _tokens(one[0]), _tokens(other[0])
    if first is None or second is None:
        return None if one[1] == other[1] else f"{other[1]:,} tokens in {other[0]} and {one[1]:,} here"
    for token in sorted(first.keys() | second.keys()):
        if first.get(token) != second.get(token):
            return f"token id {token} is {_shown(second.get(token))} in {other[0]} and {_shown(first.get(token))} here"
    return None


def _shown(text: str | None) -> str:
    return "nothing" if text is None else repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _tokens(folder: Path) -> Mapping[int, str] | None:
    """Text of every token by id; None without a `tokenizer.json` that lists them."""
    try:
        content: Any = read_json_value(folder / TOKENIZER)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            found = {index: str(entry[0]) for index, entry in enumerate(vocabulary)}
        else:
            found = {int(index): str(token) for token, index in vocabulary.items()}
        added = {int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()}
    except (OSError, ValueError, TypeError, KeyError, LookupError, AttributeError):
        return None
    return {**found, **added}
