"""Sampling options completed by what a checkpoint suggests, and the notes for the user."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from partita.errors import PackageError
from partita.observations.text_format import listing
from partita.options.fields import checked
from partita.options.sampling import GREEDY, Sampling, sampling_options
from partita.runtime.suggested import Suggestion, suggestion

__all__ = ["CHECKPOINT", "MAX_NEW_TOKENS", "SEED_BITS", "Sampling", "completed", "completed_for", "ignored"]

MAX_NEW_TOKENS = 128
"""Default where neither the caller nor the checkpoint gives a number."""
CHECKPOINT = "checkpoint"
"""The source that takes what the checkpoint suggests."""
SEED_BITS = 32


def completed(asked: Sampling, suggests: Sampling) -> Sampling:
    """The sampling with a value for every option: the given one, else that of `suggests`, else off.

    A run that samples gets a random seed where none is given, so that it can be repeated. Raises UsageError.
    """
    given = {name: getattr(suggests, name) for name in asked.figures() if name != "seed"}
    full = checked(asked).over(Sampling(**given)).over(replace(GREEDY, max_new_tokens=MAX_NEW_TOKENS))
    return replace(full, seed=secrets.randbits(SEED_BITS)) if full.temperature and full.seed is None else full


def completed_for(
    asked: Sampling, folder: Path, *, hints: bool = False, of_rows: bool = False
) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling for the package in `folder`, and notes for the user. Raises UsageError, PackageError.

    `hints`: notes also name what the checkpoint suggests and the seed that was drawn. `of_rows`: the options are
    defaults of rows, each of which may sample with a seed of its own.
    """
    suggests = suggestion(folder) if checked(asked).source else Suggestion()
    full = completed(asked, suggests)
    notes = [_unsupported(suggests)] if asked.source else []
    if hints and not asked.source:
        notes.append(_hint(asked, folder))
    if not of_rows:
        notes.append(_ignored_note(full, asked))
        if hints and full.seed != asked.seed:
            notes.append(f"seed {full.seed} was drawn; `seed={full.seed}` repeats this run")
    return full, tuple(filter(None, notes))


def ignored(full: Sampling, asked: Sampling) -> tuple[str, ...]:
    """Options that were given and that greedy decoding does not use. `full`: `asked`, completed."""
    if full.temperature:
        return ()
    off = {name: option.off for name, option in sampling_options() if option.drawn and name != "temperature"}
    return tuple(name for name, value in {**off, "seed": None}.items() if getattr(asked, name) not in (None, value))


def _ignored_note(full: Sampling, asked: Sampling) -> str:
    given = [f"`{name}`" for name in ignored(full, asked)]
    if not given:
        return ""
    verb = "is" if len(given) == 1 else "are"
    why = "temperature 0 always takes the most likely token; give `temperature` to sample"
    return f"{listing(given)} {verb} ignored: {why}"


def _unsupported(suggests: Suggestion, also: str = " also") -> str:
    """A note on settings of the checkpoint that Partita does not support."""
    names = ", ".join(suggests.unknown)
    return f"the checkpoint{also} asks for {names}, which Partita does not support" if names else ""


def _hint(asked: Sampling, folder: Path) -> str:
    """A note on what the checkpoint suggests, where no sampling option is given."""
    if asked != Sampling(max_new_tokens=asked.max_new_tokens):
        return ""
    try:
        suggests = suggestion(folder)
    except PackageError:  # the user did not ask for it
        return ""
    if not suggests.sampled:  # transformers uses no_repeat_ngram_size, for one, in greedy decoding too
        return _unsupported(suggests, also="")
    return f"greedy by default; the checkpoint suggests {suggests.words()}: `sampling=checkpoint`"
