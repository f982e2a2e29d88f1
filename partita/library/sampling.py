"""Sampling options completed with a checkpoint's suggestions, and notes for the user."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.errors import PackageError, UsageError
from partita.foreign.evidence import read_json
from partita.foreign_paths import GENAI_CONFIG
from partita.observations.text_format import listing
from partita.options.fields import check_fields
from partita.options.generation import GREEDY, sampling_options
from partita.options.generation import Sampling as Sampling
from partita.package.folder import GET_AGAIN
from partita.remedies import FROM_CHECKPOINT

FILE = "generation_config.json"
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "min_new_tokens", "penalty_alpha", "top_h")),
    **dict.fromkeys(("guidance_scale", "exponential_decay_length_penalty")),
}
"""Settings that change the next token and that Partita does not support, with their neutral value."""


@dataclass(frozen=True)
class Suggestion(Sampling):
    """Sampling options suggested by a checkpoint. None: greedy, or not set."""

    unknown: tuple[str, ...] = ()
    """`NAME VALUE` of unsupported settings."""

    @property
    def sampled(self) -> bool:
        """Whether it suggests other than greedy decoding."""
        return bool(self.temperature) or self.repetition_penalty is not None

    def words(self) -> str:
        """`temperature 0.6, top-k 50`: values that differ from Partita's defaults."""
        given = {name: value for name, value in self.figures().items() if value is not None}
        return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in given.items())


def suggestion(folder: Path) -> Suggestion:
    """The suggestion of a package or folder; greedy without one. Raises PackageError for an invalid value."""
    path = folder / FILE
    if path.exists():
        given = read_json(path, FROM_CHECKPOINT)
    else:
        path = folder / GENAI_CONFIG
        given = _transformers_keys(path, read_json(path) if path.exists() else {})
    unknown = tuple(
        f"{name} {given[name]!r}"
        for name, neutral in NEUTRAL.items()
        if given.get(name, neutral) not in (neutral, None)
    )
    draws = given.get("do_sample") is True
    values: dict[str, Any] = {
        name: option.suggested if given.get(name) is None else given[name]
        for name, option in sampling_options()
        if draws or not option.sampling_only
    }
    try:
        found = check_fields(Sampling(**values, max_new_tokens=given.get("max_new_tokens") or None))
    except UsageError as error:
        problem = error.message.replace("`", "")  # a setting of the file, not an option
        raise PackageError(f"{problem}; correct it, or omit `sampling`", path=path) from error
    off = {name: option.off_value for name, option in sampling_options()}
    figures: dict[str, Any] = {
        name: None if value == off.get(name) else value for name, value in found.figures().items()
    }
    return Suggestion(**figures, unknown=unknown)


def _transformers_keys(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The section `search` of genai_config.json with the keys of generation_config.json.

    onnxruntime-genai is greedy for a temperature of 0 or a top_k of 1, and ignores a top_p of 0. Raises PackageError if
    the section is not an object.
    """
    search = config.get("search", {})
    if not isinstance(search, dict):
        raise PackageError(f"{path}: damaged (its section 'search' is not an object)", remedy=GET_AGAIN)
    sampled = search.get("do_sample") is True and search.get("temperature") != 0 and search.get("top_k") != 1
    return {**search, "do_sample": sampled, "top_p": search.get("top_p") or None}


MAX_NEW_TOKENS = 128
"""Default if neither the caller nor the checkpoint sets a number."""
CHECKPOINT = "checkpoint"
"""The value of `sampling` for the checkpoint's suggestion."""
SEED_BITS = 32


def complete_sampling(requested: Sampling, suggests: Sampling) -> Sampling:
    """The sampling with a value for every option: the given one, else that of `suggests`, else off.

    A run that samples gets a random seed if none is set, so that it can be repeated. Raises UsageError.
    """
    given = {name: getattr(suggests, name) for name in requested.figures() if name != "seed"}
    full = (
        check_fields(requested)
        .with_defaults(Sampling(**given))
        .with_defaults(replace(GREEDY, max_new_tokens=MAX_NEW_TOKENS))
    )
    return replace(full, seed=secrets.randbits(SEED_BITS)) if full.temperature and full.seed is None else full


def complete_sampling_for(
    requested: Sampling, folder: Path, *, hints: bool = False, of_rows: bool = False
) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling for the package in `folder`, and notes for the user. Raises UsageError, PackageError.

    `hints`: notes also include the checkpoint's suggestion and the random seed. `of_rows`: the options are defaults of
    rows, each of which may sample with its own seed.
    """
    suggests = suggestion(folder) if check_fields(requested).source else Suggestion()
    full = complete_sampling(requested, suggests)
    notes = [_unsupported(suggests)] if requested.source else []
    if hints and not requested.source:
        notes.append(_hint(requested, folder))
    if not of_rows:
        notes.append(_ignored_note(full, requested))
        if hints and full.seed != requested.seed:
            notes.append(f"seed {full.seed} was chosen at random; `seed={full.seed}` repeats this run")
    return full, tuple(filter(None, notes))


def _ignored_note(full: Sampling, requested: Sampling) -> str:
    """The note on options that are set but unused in greedy decoding. `full`: the completed options."""
    off = {name: option.off_value for name, option in sampling_options() if option.sampling_only}
    unused = {**off, "seed": None} if not full.temperature else {}
    given = [f"`{name}`" for name, value in unused.items() if getattr(requested, name) not in (None, value)]
    if not given:
        return ""
    verb = "is" if len(given) == 1 else "are"
    reason = "temperature 0 always selects the most likely token; set `temperature` to sample"
    return f"{listing(given)} {verb} ignored: {reason}"


def _unsupported(suggests: Suggestion, also: str = " also") -> str:
    """The note on settings of the checkpoint that Partita does not support."""
    names = ", ".join(suggests.unknown)
    return f"the checkpoint{also} sets {names}, which Partita does not support" if names else ""


def _hint(requested: Sampling, folder: Path) -> str:
    """The note on the checkpoint's suggestion, if no sampling option is set."""
    if requested != Sampling(max_new_tokens=requested.max_new_tokens):
        return ""
    try:
        suggests = suggestion(folder)
    except PackageError:  # the user did not request it
        return ""
    if not suggests.sampled:  # transformers uses some settings, e.g. no_repeat_ngram_size, in greedy decoding, too
        return _unsupported(suggests, also="")
    return f"greedy by default; the checkpoint suggests {suggests.words()}: `sampling=checkpoint`"
