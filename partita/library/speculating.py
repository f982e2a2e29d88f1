"""Who guesses for a loaded package: opens drafts, and keeps what was measured for the next generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from partita.errors import PartitaError, UsageError
from partita.foreign.folder import AS_IT_IS, open_folder
from partita.library.chain import Target
from partita.library.probing import package_refused
from partita.library.speculation import Speculation
from partita.runtime.chain import ChainError
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.guesses import Governor, Guesser
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.runner import Runner, load_runner
from partita.runtime.speculation import draft as draft_model
from partita.runtime.speculation import ngram
from partita.runtime.speculation.asking import Asking
from partita.runtime.speculation.governor import Governor as Measured
from partita.runtime.speculation.possible import why_no_draft, why_not
from partita.spelling import spelled


@dataclass(frozen=True, slots=True)
class Guessers:
    """Who guesses in a generation, and who says how much."""

    guesser: Callable[[], Guesser]
    """A new one for each row."""
    governor: Governor


class Speculators:
    """Who guesses for one loaded package. What was measured of steps and guesses is kept for its next generations."""

    def __init__(self, folder: Path, target: Target, threads: int | None) -> None:
        self._folder, self._target, self._threads = folder, target, threads
        self._governors: dict[str | None, Measured] = {}
        self._drafts: dict[str, Runner] = {}

    def guessers(self, executor: Executor, asked: Speculation) -> Guessers | None:
        """Who guesses for a generation; None where nobody was asked to.

        Raises UsageError where the package cannot confirm guesses, or the draft cannot make any; PackageError,
        ProviderError and ResourceError when the draft does not open.
        """
        if not asked:
            return None
        why = why_not(executor)
        if why is not None:
            option = spelled("draft", asked.draft) if asked.draft else spelled("speculate", asked.speculate)
            raise UsageError(f"{option}: {self._folder} cannot confirm guesses: {why}")
        if asked.draft is None:
            return Guessers(ngram.NgramGuesser, self._governor(None, ngram.PRIORS))
        draft = self._draft(asked.draft)
        governor = self._governor(asked.draft, draft_model.PRIORS, draft.executor)
        vocab_size = executor.contract.vocab_size
        return Guessers(lambda: draft_model.DraftGuesser(draft.executor, vocab_size), governor)

    def close(self) -> None:
        """Close the drafts. May be called twice."""
        while self._drafts:
            self._drafts.popitem()[1].close()

    def _governor(self, key: str | None, priors: tuple[float, ...], draft: Executor | None = None) -> Measured:
        """Who says how much, for another generation. What a step of a draft takes is measured before the first."""
        if key not in self._governors:
            self._governors[key] = Measured(priors, asking=None if draft is None else _asking(draft))
        governor = self._governors[key]
        governor.begin()
        return governor

    def _draft_options(self) -> Mapping[str, Mapping[str, str]]:
        """Those of the package's providers, and what suits packages that take turns."""
        options = self._target.options
        turns = {provider.name: provider.in_turns for provider in self._target.chain if provider.in_turns}
        return {**options, **{name: {**suits, **options.get(name, {})} for name, suits in turns.items()}}

    def _draft(self, path: str) -> Runner:
        """The draft, opened on the chain of the package; kept until the package is closed."""
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
        why = why_no_draft(runner.executor)
        if why is not None:
            runner.close()
            raise UsageError(f"{spelled('draft', path)}: this package cannot draft: {why}")
        self._drafts[path] = runner
        return runner


def _asking(draft: Executor) -> Asking:
    """What a draft takes; unknown where its run fails, which is told when it is asked for guesses."""
    try:
        return draft_model.timed(draft)
    except PartitaError:
        return Asking()
