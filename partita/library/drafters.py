"""The drafters of a loaded package: n-gram lookup, and draft packages, which stay open until it is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from partita.errors import UsageError
from partita.foreign.folder import AS_IT_IS, open_folder
from partita.library.chain import Target
from partita.library.probing import package_refused
from partita.library.speculation import Speculation
from partita.runtime.chain import ChainError
from partita.runtime.engine.drafting import DraftControl
from partita.runtime.engine.executor import Runner
from partita.runtime.engine.request import Drafter
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.runner import load_runner
from partita.runtime.speculation.draft import DraftModel
from partita.runtime.speculation.eligibility import why_no_draft, why_not
from partita.runtime.speculation.length import DraftLength
from partita.runtime.speculation.ngram import NgramDrafter

Drafting = tuple[Callable[[], Drafter] | None, DraftControl | None]


class Drafters:
    """Drafters for one loaded package. Measured times and acceptance rates are kept for later requests."""

    def __init__(self, folder: Path, target: Target, threads: int | None) -> None:
        self._folder, self._target, self._threads = folder, target, threads
        self._lengths: dict[str | None, DraftLength] = {}
        self._drafts: dict[str, Runner] = {}

    def drafting(self, runner: Runner, asked: Speculation) -> Drafting:
        """What makes and controls draft tokens; None and None without speculative decoding.

        Raises UsageError when the package cannot verify draft tokens, or the draft package cannot make any;
        PackageError, ProviderError and ResourceError when the draft package does not open.
        """
        if not asked:
            return None, None
        why = why_not(runner)
        if why is not None:
            option = f"`draft={asked.draft}`" if asked.draft else f"`speculate={asked.speculate}`"
            raise UsageError(f"{option}: {self._folder} cannot verify draft tokens: {why}")
        control = self._lengths.setdefault(asked.draft, DraftLength())
        if asked.draft is None:
            return NgramDrafter, control
        draft, vocab_size = self._draft(asked.draft), runner.contract.vocab_size
        return partial(DraftModel, draft, vocab_size), control

    def close(self) -> None:
        """Close the draft packages. May be called twice."""
        while self._drafts:
            self._drafts.popitem()[1].close()

    def _draft_options(self) -> Mapping[str, Mapping[str, str]]:
        """The package's provider options, and those that suit two packages which run in turns."""
        options = self._target.options
        turns = {provider.name: provider.in_turns for provider in self._target.chain if provider.in_turns}
        return {**options, **{name: {**suits, **options.get(name, {})} for name, suits in turns.items()}}

    def _draft(self, path: str) -> Runner:
        """The draft package, opened on the chain of the package."""
        if path in self._drafts:
            return self._drafts[path]
        folder = Path(path)
        manifest = open_folder(folder, AS_IT_IS)
        try:
            runner = load_runner(
                folder, self._target.chain, threads=self._threads, manifest=manifest, options=self._draft_options()
            )
        except (ChainError, NoKernelError) as error:
            raise package_refused(error, 0.0) from error
        why = why_no_draft(runner)
        if why is not None:
            runner.close()
            raise UsageError(f"`draft={path}`: this package cannot draft: {why}")
        self._drafts[path] = runner
        return runner
