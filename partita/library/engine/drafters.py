"""Drafters of the requests of a loaded package."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.errors import UsageError
from partita.foreign.folder import NO_CHOICE, open_folder
from partita.library.chain import Target
from partita.options.fields import PathText
from partita.options.generation import SpeculationOptions
from partita.runtime.generate.bound_graph import SMALL_STEP_TOKENS
from partita.runtime.generate.choice.drafting import (
    DraftLength,
    DraftLengths,
    ngram_draft,
    no_draft_reason,
    no_speculation_reason,
)
from partita.runtime.generate.choice.sampling import greedy
from partita.runtime.generate.loop import GenerationLoop
from partita.runtime.generate.request import Drafter, Request
from partita.runtime.generate.runner import Runner, load_runner


class DraftModel:
    """A drafter that runs a smaller package, one row at a time; the prefix cache has most tokens of the row.

    Raises ProviderError or ResourceError when its run fails.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """`runner`: of the draft package, batch size 1. `vocab_size`: of the target model."""
        self._loop, self._vocab_size = GenerationLoop(runner, shares=True), vocab_size

    def __call__(self, history: npt.NDArray[np.int64], most: int, /) -> list[int]:
        """At most `most` draft tokens after `history` [n]; 0 only prefills it."""
        if len(history) > self._loop.runner.contract.max_length:
            return []
        request = Request(
            history.tolist(),
            greedy if most else None,
            most,
            continues_at=max(0, len(history) - SMALL_STEP_TOKENS),
            any_logits=True,  # wrong draft tokens are rejected
        )
        if self._loop.runner.cache.dirty:  # a run without finite logits
            self._loop.runner.cache.prepare()
        row = self._loop.add_request(request)
        tokens = [token for step in iter(self._loop.step, None) for token in step.tokens[row]]
        self._loop.release_row(row)
        return [*takewhile(lambda token: token < self._vocab_size, tokens)]


class Drafters:
    """Drafters for one loaded package. Measured times and acceptance rates are kept for later requests."""

    def __init__(self, folder: Path, target: Target) -> None:
        self._folder, self._target = folder, target
        self._lengths: dict[PathText | None, DraftLengths] = {}
        self._drafts: dict[PathText, Runner] = {}

    def drafting(self, runner: Runner, options: SpeculationOptions) -> tuple[Drafter | None, DraftLengths | None]:
        """The drafter of requests and its control; None and None without speculative decoding.

        Raises UsageError when the package cannot verify draft tokens or the draft package cannot be used; PackageError,
        ProviderError and ResourceError when the draft package does not open.
        """
        given = options.speculation_texts()
        if not given:
            return None, None
        reason = no_speculation_reason(runner)
        if reason is not None:
            ((name, value),) = given.items()
            raise UsageError(f"`{name}={value}`: {self._folder} cannot verify draft tokens: {reason}")
        control = self._lengths.setdefault(options.draft, DraftLengths(DraftLength))
        if options.draft is None:
            return ngram_draft, control
        if options.draft not in self._drafts:
            self._drafts[options.draft] = self._opened(options.draft)
        return DraftModel(self._drafts[options.draft], runner.contract.vocab_size), control

    def close(self) -> None:
        """Close the draft packages. May be called repeatedly."""
        while self._drafts:
            self._drafts.popitem()[1].close()

    def _opened(self, path: PathText) -> Runner:
        """The draft package on the package's chain, with provider options for two packages that alternate."""
        folder, target = Path(path), self._target
        manifest, options = open_folder(folder, NO_CHOICE), {**target.options}
        for provider in target.chain:
            if provider.alternating_options:
                options[provider.name] = {**provider.alternating_options, **options.get(provider.name, {})}
        runner = load_runner(folder, target.chain, threads=target.threads, manifest=manifest, options=options)
        reason = no_draft_reason(runner)
        if reason is not None:
            runner.close()
            raise UsageError(f"`draft={path}`: this package cannot be a draft package: {reason}")
        return runner
