"""Parser of requirements such as `provider=webgpu,share>=0.95`. Pure.

A requirement is a list of conditions. Selectors choose nodes and phases; measures compare a figure of the selected
nodes, a phase, the whole report, or the change since a baseline with a limit.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from partita.errors import UsageError
from partita.observations.text_format import listing
from partita.options.flags import with_flags

SELECTORS = {
    "phase": "prefill, decode or run; default: every phase",
    "op": "nodes of this operator",
    "module": "nodes of this module, by part of its path: layers.0 or self_attn",
    "provider": "nodes on this provider, by any of its names",
    "reason": "nodes off a preferred provider for this reason",
}
"""Fields that select nodes or phases, with = and != only."""
COUNTED = {
    "nodes": "number of selected nodes of the plan",
    "share": "nodes on `provider`, or with `reason`, as a fraction of the nodes of `op` and `module`: 0 to 1, or 95%. "
    "Nodes of the file are counted: a compiled node counts as all nodes it was compiled from; nodes added by ONNX "
    "Runtime do not count",
    "time_share": "the same fraction of the host time of nodes",
}
"""Fields that measure the selected nodes."""
MEASURED = {
    "partitions": "partitions of the phase",
    "copies": "Memcpy nodes and copies at the session border in one run",
    "copy_bytes_per_token": "bytes of all copies, per new token",
    "tokens_per_second": "speed of the phase",
    "p50_ms": "median time of a step",
}
"""Fields that measure a whole phase; the only selector for them is `phase`."""
STATED = {
    "cpu_nodes": "nodes on the CPU provider, including control-flow subgraphs, in the phase with the most",
    "memcpy_nodes": "Memcpy nodes of decode or of the only phase, including control-flow subgraphs",
    "copy_bytes": "bytes copied by a run of decode or of the only phase, including session inputs and outputs",
    "unavailable": "installed providers of the chain, or skipped by a default chain, that could not start",
    "unexplained": "fallbacks without a reason, in the phase with the most",
    "cache_in_place": "1 if every state was observed to stay in one buffer, 0 if one was not",
    "decode_tokens_per_second": "speed of decode, or of the only phase",
}
"""Fields that measure the whole report; they allow no selectors."""
LOST = {
    "wanted_other": "1 if the preferred provider differs",
    "lost_phases": "phases of the baseline that were not run",
    "nodes_left": "nodes that moved to a less preferred provider",
    "new_reasons": "fallback nodes that were on that preferred provider or on a more preferred one",
    "more_copies": "additional copies, in the phase with the largest increase",
    "more_copy_bytes": "additional bytes copied per run, in the phase with the largest increase",
    "lost_cache": "1 if the cache was in place in the baseline and is not now",
    "slowdown": "extra time per token relative to the baseline: 0.1 is 10 % more",
}
"""Fields that measure regressions from a baseline; they allow no selectors."""
FIELDS = {**SELECTORS, **COUNTED, **MEASURED, **STATED, **LOST}
PHASES = ("prefill", "decode", "run")
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Valid values of selectors."""

    provider: Callable[[str], str]
    """The user's provider name -> ONNX Runtime's name. Raises UsageError for an unknown name."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selector:
    """A condition that selects nodes or phases."""

    field: str
    equal: bool
    value: str


@dataclass(frozen=True, slots=True)
class Measure:
    """A condition on a number."""

    field: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class Requirement:
    """Conditions that must all hold."""

    written: str
    """The user's option: --require with the text, or a short form."""
    text: str
    selectors: tuple[Selector, ...]
    measures: tuple[Measure, ...]


def short_form(written: str, field: str, sign: str, value: float) -> Requirement:
    """The requirement of an option that is a short form."""
    shown = int(value) if float(value).is_integer() else value
    return Requirement(with_flags(written), f"{field}{sign}{shown}", (), (Measure(field, sign, value),))


def parse_requirement(text: str, words: Vocabulary) -> Requirement:
    """Parse comma-separated `FIELD OP VALUE` conditions. Raises UsageError with the valid fields or values."""
    selectors: list[Selector] = []
    measures: list[Measure] = []
    for part in text.split(","):
        found = CONDITION.fullmatch(part)
        if found is None:
            raise UsageError(f"`require={text}`: {part.strip()!r} is not FIELD OP VALUE, for example share>=0.95")
        field, sign, value = found.groups()
        if field in SELECTORS:
            selectors.append(_parse_selector(text, field, sign, value, words))
        elif field in FIELDS:
            measures.append(Measure(field, sign, _parse_number(text, field, value)))
        else:
            raise UsageError(f"`require={text}`: {_unknown(field, FIELDS, 'field')}")
    _check_sense(text, selectors, measures)
    return Requirement(f"--require {text}", text, tuple(selectors), tuple(measures))


def _parse_selector(text: str, field: str, sign: str, value: str, words: Vocabulary) -> Selector:
    """A selector."""
    if sign not in ("=", "==", "!="):
        raise UsageError(f"`require={text}`: {field} takes = or !=, not {sign}")
    if not value:
        raise UsageError(f"`require={text}`: {field} has no value")
    if field == "phase" and value not in PHASES:
        raise UsageError(f"`require={text}`: {_unknown(value, PHASES, 'phase')}")
    if field == "reason" and value not in words.reasons:
        raise UsageError(f"`require={text}`: {_unknown(value, words.reasons, 'reason')}")
    return Selector(field, sign != "!=", words.provider(value) if field == "provider" else value)


def _parse_number(text: str, field: str, value: str) -> float:
    """A finite number; a value with % is divided by 100."""
    try:
        # Decimal, because 96.4 / 100 differs from 0.964 as a float.
        number = float(Decimal(value.removesuffix("%")) / (100 if value.endswith("%") else 1))
    except ArithmeticError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"`require={text}`: {field} is compared with a number, not {value!r}")
    if field.endswith("share") and not 0 <= number <= 1:
        raise UsageError(f"`require={text}`: {field} is between 0 and 1, or 0% and 100%, not {value}")
    return number


def _check_sense(text: str, selectors: Sequence[Selector], measures: Sequence[Measure]) -> None:
    """Raise UsageError for conditions that cannot be combined, or without a measure."""
    if not measures:
        every = ", ".join((*COUNTED, *MEASURED, *STATED, *LOST))
        raise UsageError(f"`require={text}`: it has no measure; add one of {every}, for example share>=0.95")
    fields = [entry.field for entry in selectors]
    whole = [entry.field for entry in measures if entry.field in MEASURED]
    if whole and set(fields) - {"phase"}:
        extra = listing(field for field in fields if field != "phase")
        raise UsageError(f"`require={text}`: {whole[0]} measures a whole phase; use it without {extra}")
    stated = [entry.field for entry in measures if entry.field in STATED or entry.field in LOST]
    if stated and fields:
        raise UsageError(f"`require={text}`: {stated[0]} measures a whole report; use it without {fields[0]}")
    shares = [entry.field for entry in measures if entry.field.endswith("share")]
    if shares and not {"provider", "reason"} & set(fields):
        raise UsageError(
            f"`require={text}`: {shares[0]} needs provider or reason, for example provider=cuda,share>=0.95"
        )


def _unknown(word: str, known: Iterable[str], noun: str) -> str:
    """Message for an unknown word, with a suggestion and the valid words."""
    listed = list(known)
    near = difflib.get_close_matches(word.lower(), listed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {noun} {word!r}{hint}; known: {', '.join(listed)}"
