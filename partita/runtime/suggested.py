"""How the checkpoint wants to be sampled: what generation_config.json of a package says of it, or, in a folder that has
none, the section `search` of onnxruntime-genai's genai_config.json.

The values are those with which transformers' `generate` would run, whose defaults apply where the file says nothing
(transformers, GenerationConfig._get_default_generation_params), and likewise onnxruntime-genai's own, whose defaults
are the same (config.h). Knows nothing of options or of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.capped import is_number, read_json_value
from partita.errors import PackageError
from partita.options.fields import SamplingOption
from partita.options.sampling import Sampling, sampling_options
from partita.package import GET_AGAIN
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.strangers import GENAI_CONFIG

FILE = "generation_config.json"
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
    "encoder_repetition_penalty": 1.0,
    "top_h": None,
}
"""Settings that change which token comes next and that Partita does not have, with the value that changes nothing."""


@dataclass(frozen=True)
class Suggestion(Sampling):
    """What a checkpoint suggests. None: greedy, or it says nothing."""

    unknown: tuple[str, ...] = ()
    """`NAME VALUE` of settings that Partita does not have."""

    @property
    def sampled(self) -> bool:
        """Whether anything but the likeliest token is to be taken."""
        return bool(self.temperature) or self.repetition_penalty is not None

    def words(self) -> str:
        """`temperature 0.6, top-k 50`: what differs from Partita's own defaults."""
        given = {name: value for name, value in self.figures().items() if value is not None}
        return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in given.items())


def suggestion(folder: Path) -> Suggestion:
    """What the package or folder `folder` suggests; greedy where it says nothing. Raises PackageError for a value that
    is none.
    """
    path, given = folder / FILE, _object(folder / FILE, FROM_CHECKPOINT)
    if given is None:
        path = folder / GENAI_CONFIG
        given = _as_transformers_says(path, _object(path, GET_AGAIN) or {})
    read = _Reader(path, given)
    unknown = tuple(
        f"{name} {given[name]!r}"
        for name, neutral in NEUTRAL.items()
        if given.get(name, neutral) not in (neutral, None)
    )
    draws = given.get("do_sample") is True
    found = {name: read.option(name, option) for name, option in sampling_options() if draws or not option.drawn}
    return Suggestion(**found, max_new_tokens=read.whole("max_new_tokens", 0) or None, unknown=unknown)


def _object(path: Path, remedy: Remedy) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none. Raises PackageError for what is no object."""
    try:
        given = read_json_value(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PackageError(f"{path}: damaged ({error})", remedy=remedy) from error
    if not isinstance(given, dict):
        raise PackageError(f"{path}: damaged (no object)", remedy=remedy)
    return given


def _as_transformers_says(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The section `search` of genai_config.json, as generation_config.json would say it. Raises PackageError for one
    that is no object.

    onnxruntime-genai draws nothing where a temperature of 0 or a top_k of 1 leaves one token to draw, and takes a top_p
    of 0 for none.
    """
    search = config.get("search", {})
    if not isinstance(search, dict):
        raise PackageError(f"{path}: damaged, its section 'search' is no object", remedy=GET_AGAIN)
    sampled = search.get("do_sample") is True and search.get("temperature") != 0 and search.get("top_k") != 1
    return {**search, "do_sample": sampled, "top_p": search.get("top_p") or None}


class _Reader:
    """Values of the file, each checked."""

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        self.path, self.given = path, given

    def option(self, name: str, option: SamplingOption) -> Any:
        """The value of an option; None for the one that changes nothing."""
        limits, value = option.range, self.given.get(name)
        if value is None:
            return option.suggested
        if not is_number(value) or (limits is not None and (value not in limits or value == limits.also)):
            raise self.bad(name, value)
        found = self.whole(name, 0) if isinstance(option.off, int) else float(value)
        return None if found == option.off else found

    def whole(self, name: str, default: int) -> int:
        value = self.given.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.bad(name, value)
        return value

    def bad(self, name: str, value: Any) -> PackageError:
        return PackageError(
            f"{self.path}: {name} is {value!r}, which is not a valid sampling setting; correct it, or leave "
            "`sampling` out"
        )
