"""Options of speculative decoding, and the checks that need nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from partita.errors import UsageError
from partita.foreign.folder import AS_IT_IS, open_folder
from partita.observations.facts import SpeculationFact
from partita.options.generation import SpeculationOptions
from partita.package import Manifest
from partita.runtime.speculation.vocabulary import differing

NGRAM: Literal["ngram"] = "ngram"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding as it was asked for. At most one of the two is given."""

    speculate: str | None = None
    """`ngram`: lookup in the row's own text."""
    draft: str | None = None
    """Folder of the draft package."""

    @classmethod
    def of(cls, options: SpeculationOptions) -> Self:
        """The speculation of a verb's options."""
        return cls(options.speculate, None if options.draft is None else str(options.draft))

    @property
    def told(self) -> Mapping[str, str]:
        """As a report repeats it."""
        given = {"speculate": self.speculate, "draft": self.draft}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def reads(self) -> tuple[Path, ...]:
        """What is read beside the package."""
        return () if self.draft is None else (Path(self.draft),)

    def fact(self) -> SpeculationFact | None:
        """As the facts of a run have it; None without speculative decoding."""
        if self.draft is not None:
            return SpeculationFact("draft", Path(self.draft).name)
        return SpeculationFact(NGRAM) if self.speculate is not None else None

    def __bool__(self) -> bool:
        return self.speculate is not None or self.draft is not None


NO_SPECULATION = Speculation()


def check_speculation(folder: Path, manifest: Manifest, asked: Speculation) -> None:
    """Check what can be checked without a session. Raises UsageError for an option that makes no sense and for a draft
    of another vocabulary, PackageError for a draft that is no package.
    """
    if asked.speculate not in (None, NGRAM):
        raise UsageError(f"`speculate={asked.speculate}`: the only value is {NGRAM}; or give `draft` a package")
    if asked.draft is None:
        return
    if asked.speculate is not None:
        raise UsageError(f"`speculate={asked.speculate}` and `draft`: give only one of them")
    if manifest.graph.batch_size != 1:
        raise UsageError(
            f"`draft={asked.draft}` works at batch size 1, and {folder} has {manifest.graph.batch_size}; "
            f"give `speculate={NGRAM}`, or export with `batch_size=1`"
        )
    other = Path(asked.draft)
    draft = open_folder(other, AS_IT_IS)
    found = differing((folder, manifest.graph.vocab_size), (other, draft.graph.vocab_size))
    if found is not None:
        raise UsageError(
            f"`draft={asked.draft}`: its vocabulary is another than that of {folder}: {found}; "
            "a draft needs the same tokenizer"
        )
