"""Options of sampling."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Self

from partita.options.fields import MAX_SEED, TOKENS, Range, SamplingOption, describe_fields, option, sampling_option


@dataclass(frozen=True)
class SamplingValues:
    """Sampling options and the maximum number of new tokens."""

    HELP_GROUP = "Sampling"
    temperature: float | None = sampling_option(
        "0 (default) always takes the most likely token; from 0.001 to 100, higher values are more random.",
        flags=("--temperature", "--temp", "-t"),
        range=Range(1e-3, 100, "0 (greedy) or from 0.001 to 100", extra_value=0),
        off_value=0.0,
        suggested=1.0,
    )
    top_k: int | None = sampling_option(
        "Sample from the k most likely tokens; 0 (default) turns this off.",
        range=Range(0, text="0 (off) or more"),
        off_value=0,
        suggested=50,
    )
    top_p: float | None = sampling_option(
        "Sample from the most likely tokens that add up to this probability; 1 (default) turns this off.",
        range=Range(maximum=1, above=0, text="above 0 and at most 1 (off)"),
        off_value=1.0,
    )
    min_p: float | None = sampling_option(
        "Drop tokens below this fraction of the probability of the most likely token; 0 (default) turns this off.",
        range=Range(0, 1, "from 0 (off) to 1"),
        off_value=0.0,
    )
    repetition_penalty: float | None = sampling_option(
        "From 0.01 to 100; above 1, tokens that already occurred are less likely. Default: 1 (off).",
        range=Range(0.01, 100, "from 0.01 to 100 (1: off)"),
        off_value=1.0,
        sampling_only=False,
    )
    seed: int | None = option(
        "Seed of the sampler, to reproduce a run. Default: random, and printed.",
        short="-s",
        range=Range(0, MAX_SEED, "from 0 to 2**64 - 1"),
    )
    max_new_tokens: int | None = option(
        "Maximum number of tokens to generate. Default: 128.",
        flags=("--max-new-tokens", "--max-tokens", "-n"),
        range=TOKENS,
    )

    def __post_init__(self) -> None:
        """Convert numbers of other libraries to Python numbers."""
        for name, value in self.figures().items():
            if hasattr(value, "ndim") or not isinstance(value, (int, float, NoneType)):
                object.__setattr__(self, name, _number(value))

    def figures(self) -> dict[str, Any]:
        """The options as a dict."""
        return {each.name: getattr(self, each.name) for each in describe_fields(SamplingValues)}


@dataclass(frozen=True)
class Sampling(SamplingValues):
    """Sampling of a request. None: not set; then greedy, or the checkpoint's generation_config.json."""

    HELP_GROUP = "Sampling"
    source: str | None = option(
        "Sample as in the checkpoint's generation_config.json; explicit options take precedence.",
        flags=("--sampling",),
        choices=("checkpoint",),
        argument="sampling",
    )

    def with_defaults(self, other: Self) -> Self:
        """These options, with those of `other` that are not set here."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(other, **given)


def _number(value: Any) -> Any:
    """A number of another library as a Python number; other values unchanged."""
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value) if hasattr(value, "__index__") else value


def sampling_options() -> Iterator[tuple[str, SamplingOption]]:
    """Name and description of every sampling option."""
    return (
        (each.name, each.option) for each in describe_fields(SamplingValues) if isinstance(each.option, SamplingOption)
    )


GREEDY = Sampling(**{name: option.off_value for name, option in sampling_options()})  # type: ignore[arg-type]
"""Every option off."""
