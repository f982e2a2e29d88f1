"""Requirements such as `provider=webgpu,share>=0.95`, and the limits of `place` and `generate`. Pure.

A requirement is a list of conditions. Selectors choose nodes and phases; measures compare a figure with a limit.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Self

from partita.errors import UsageError
from partita.observations.names import CPU
from partita.observations.text_format import listing
from partita.options.fields import group, option_flags
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
class Vocabulary:
    """Valid values of selectors."""

    provider: Callable[[str], str]
    """The user's provider name -> ONNX Runtime's name. Raises UsageError for an unknown name."""
    reasons: tuple[str, ...]


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


def parse_requirement(text: str, words: Vocabulary) -> Requirement:
    """Parse comma-separated `FIELD OP VALUE` conditions. Raises UsageError with the valid fields or values."""
    selectors: list[Condition] = []
    measures: list[Condition] = []
    for part in text.split(","):
        found = CONDITION.fullmatch(part)
        if found is None:
            raise UsageError(f"`require={text}`: {part.strip()!r} is not FIELD OP VALUE, for example share>=0.95")
        field, sign, value = found.groups()
        if field in SELECTORS:
            selectors.append(_parse_selector(text, field, sign, value, words))
        elif field in MEASURES:
            measures.append(Condition(field, sign, limit=_parse_number(text, field, value)))
        else:
            raise UsageError(f"`require={text}`: {_unknown(field, FIELDS, 'field')}")
    _check_combination(text, selectors, measures)
    return Requirement(text, tuple(selectors), tuple(measures))


def _parse_selector(text: str, field: str, sign: str, value: str, words: Vocabulary) -> Condition:
    """A selector. Raises UsageError for an invalid one."""
    if sign not in ("=", "==", "!="):
        raise UsageError(f"`require={text}`: {field} takes = or !=, not {sign}")
    if not value:
        raise UsageError(f"`require={text}`: {field} has no value")
    for name, known in (("phase", PHASES), ("reason", words.reasons)):
        if field == name and value not in known:
            raise UsageError(f"`require={text}`: {_unknown(value, known, name)}")
    return Condition(field, sign, words.provider(value) if field == "provider" else value)


def _parse_number(text: str, field: str, value: str) -> float:
    """A finite number; a value with % is divided by 100. Raises UsageError for any other text."""
    try:
        # Decimal, because 96.4 / 100 differs from 0.964 as a float.
        number = float(Decimal(value.removesuffix("%")) / (100 if value.endswith("%") else 1))
    except ArithmeticError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"`require={text}`: {field} is compared with a number, not {value!r}")
    if field == "share" and not 0 <= number <= 1:
        raise UsageError(f"`require={text}`: {field} is between 0 and 1, or 0% and 100%, not {value}")
    return number


def _check_combination(text: str, selectors: Sequence[Condition], measures: Sequence[Condition]) -> None:
    """Raise UsageError for conditions that cannot be combined, or without a measure."""
    if not measures:
        raise UsageError(f"`require={text}`: it has no measure; add {listing(MEASURES)}, for example share>=0.95")
    fields = [entry.field for entry in selectors]
    extra = [field for field in fields if field != "phase"]
    for measure in measures:
        if measure.field in PHASE_MEASURES and extra:
            raise UsageError(
                f"`require={text}`: {measure.field} measures a whole phase; use it without {listing(extra)}"
            )
        if measure.field == "share" and not {"provider", "reason"} & set(fields):
            raise UsageError(f"`require={text}`: share needs provider or reason, for example provider=cuda,share>=0.95")


def _unknown(word: str, known: Iterable[str], noun: str) -> str:
    """Message for an unknown word, with a suggestion and the valid words."""
    listed = list(known)
    near = difflib.get_close_matches(word.lower(), listed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {noun} {word!r}{hint}; known: {', '.join(listed)}"
