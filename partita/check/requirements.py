"""Requirements such as `provider=webgpu,share>=0.95`, and the limits of `place` and `generate`. Pure.

A requirement is a list of conditions. Selectors choose nodes and phases; measures compare a figure with a limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Self

from partita.errors import UsageError
from partita.messages import did_you_mean, nearest
from partita.observations.codes import CODES
from partita.observations.names import CPU
from partita.observations.text_format import listing
from partita.options.fields import group, option_flags, with_flags
from partita.options.groups import PlacementLimits

SELECTORS = ("phase", "op", "module", "provider", "reason")
"""Fields that select nodes or phases, with = and != only."""
NODE_MEASURES = ("nodes", "share")
"""Fields that measure the selected nodes."""
PHASE_MEASURES = ("copies", "tokens_per_second", "unavailable")
"""Fields that measure a whole phase or report; the only selector for them is `phase`."""
MEASURES = (*NODE_MEASURES, *PHASE_MEASURES)
"""Fields that are compared with a number."""
FIELDS = (*SELECTORS, *MEASURES)
PHASES = ("prefill", "decode", "run")
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A selector of nodes or phases, or a measure with its limit."""

    field: str
    sign: str
    value: str = ""
    limit: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether a selector selects what has the value."""
        return self.sign != "!="


@dataclass(frozen=True, slots=True)
class Requirement:
    """Conditions that must all hold."""

    text: str
    selectors: tuple[Condition, ...]
    measures: tuple[Condition, ...]


@dataclass(frozen=True)
class Limits(PlacementLimits):
    """Limits of a placement. None: no limit."""

    @classmethod
    def of(cls, options: PlacementLimits) -> Self:
        """The limits in a command's options."""
        return group(options, cls)

    def as_dict(self) -> dict[str, int]:
        """Name -> limit, without None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def by_option(self) -> dict[str, int]:
        """Command-line option -> limit, as in a report."""
        return {option_flags()[name]: value for name, value in self.as_dict().items()}


def check_limits(limits: Limits, chain: Sequence[str]) -> None:
    """Raise UsageError for a limit that contradicts the providers of `chain` (ONNX Runtime's names)."""
    if chain and chain[0] == CPU and limits.max_cpu_nodes is not None:
        raise UsageError(
            f"`max_cpu_nodes={limits.max_cpu_nodes}` contradicts `providers`, whose first provider is cpu: "
            "every node belongs there; remove the limit or name another provider first"
        )


def parse_requirement(text: str, provider_name: Callable[[str], str]) -> Requirement:
    """Parse comma-separated `FIELD OP VALUE` conditions. Raises UsageError with the valid fields or values.

    `provider_name`: the user's name of a provider -> ONNX Runtime's; raises UsageError.
    """
    try:
        conditions = [_parse_condition(part.strip(), provider_name) for part in text.split(",")]
        _check_combination(conditions)
    except ValueError as error:
        raise UsageError(f"`require={text}`: {error}") from error
    parts = [tuple(each for each in conditions if each.field in fields) for fields in (SELECTORS, MEASURES)]
    return Requirement(with_flags(f"`require={text}`"), *parts)


def _parse_condition(text: str, provider_name: Callable[[str], str]) -> Condition:
    """One condition. Raises ValueError, UsageError."""
    found = CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not FIELD OP VALUE, for example share>=0.95")
    field, sign, value = found.groups()
    known = {"phase": PHASES, "reason": CODES}
    _check_word("field", field, FIELDS)
    if field in MEASURES:
        return Condition(field, sign, limit=_parse_number(field, value))
    if sign not in ("=", "==", "!="):
        raise ValueError(f"{field} takes = or !=, not {sign}")
    if not value:
        raise ValueError(f"{field} has no value")
    if field in known:
        _check_word(field, value, known[field])
    return Condition(field, sign, provider_name(value) if field == "provider" else value)


def _check_word(noun: str, word: str, known: Sequence[str]) -> None:
    """Raise ValueError for an unknown word, with suggestions and the valid words."""
    if word not in known:
        raise ValueError(f"unknown {noun} {word!r}; {did_you_mean(nearest(word, known))}known: {', '.join(known)}")


def _parse_number(field: str, value: str) -> float:
    """A finite number; a value with % is divided by 100. Raises ValueError for any other text."""
    try:
        # Decimal, because 96.4 / 100 differs from 0.964 as a float.
        number = float(Decimal(value.removesuffix("%")) / (100 if value.endswith("%") else 1))
    except ArithmeticError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{field} is compared with a number, not {value!r}")
    if field == "share" and not 0 <= number <= 1:
        raise ValueError(f"{field} is between 0 and 1, or 0% and 100%, not {value}")
    return number


def _check_combination(conditions: Sequence[Condition]) -> None:
    """Raise ValueError for conditions that cannot be combined, or without a measure."""
    fields = {each.field for each in conditions}
    whole, extra = fields & {*PHASE_MEASURES}, fields & {*SELECTORS} - {"phase"}
    if not fields & {*MEASURES}:
        raise ValueError(f"it has no measure; add {listing(MEASURES)}, for example share>=0.95")
    if whole and extra:
        raise ValueError(f"{listing(sorted(whole))} measures a whole phase; use it without {listing(sorted(extra))}")
    if "share" in fields and not fields & {"provider", "reason"}:
        raise ValueError("share needs provider or reason, for example provider=cuda,share>=0.95")
