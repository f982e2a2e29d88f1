"""The words in which everything is asked of a report: `provider=webgpu,share>=0.95`, and the short forms of it. Pure.

A requirement is a list of conditions that all have to hold, in every phase it is about. Some conditions select nodes,
the others measure: those that were selected, the phase, the whole report, or what was lost since a baseline.
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
    "phase": "prefill, decode or run; without it: every phase",
    "op": "nodes of this operator",
    "module": "nodes of this module, a part of its path: layers.0 or self_attn",
    "provider": "nodes on this provider, by any of its names",
    "reason": "nodes off a preferred provider for this reason",
}
"""Fields that say which nodes are meant; they take = and != only."""
COUNTED = {
    "nodes": "how many nodes of the plan are selected",
    "share": "nodes on `provider`, or with `reason`, as a fraction of those of `op` and `module`: 0 to 1, or "
    "95%. Nodes of "
    "the file are counted: a compiled one counts as all nodes it was compiled from, what ONNX Runtime added is "
    "left out",
    "time_share": "the same fraction of the host time of nodes",
}
"""Fields that measure the nodes that are meant."""
MEASURED = {
    "partitions": "partitions of the phase",
    "copies": "Memcpy nodes and copies at the session border in one run",
    "copy_bytes_per_token": "bytes of all copies, per new token",
    "tokens_per_second": "speed of the phase",
    "p50_ms": "median time of a step",
}
"""Fields that measure a whole phase; beside them only `phase` selects."""
STATED = {
    "cpu_nodes": "nodes on the CPU provider, in the phase that has most of them; control-flow subgraphs are counted",
    "memcpy_nodes": "Memcpy nodes of decode or of the only phase; control-flow subgraphs are counted",
    "copy_bytes": "bytes that a run of decode or of the only phase copies; those at the session border are counted",
    "unavailable": "installed providers of the chain that could not start, those that a default chain skipped included",
    "unexplained": "fallbacks without a reason, in the phase that has most of them",
    "cache_in_place": "1 when every state was observed to stay in one buffer, 0 when one was not",
    "decode_tokens_per_second": "speed of decode, or of the only phase",
}
"""Fields that measure the whole report; nothing selects beside them."""
LOST = {
    "wanted_other": "1 when another provider is preferred",
    "lost_phases": "phases of the baseline that were not run",
    "nodes_left": "nodes that moved to a less preferred provider",
    "new_reasons": "nodes off a preferred provider that were on it or on a more preferred one",
    "more_copies": "copies more than in the baseline, in the phase where they are most",
    "more_copy_bytes": "bytes more per run, in the phase where they are most",
    "lost_cache": "1 when the cache was in place in the baseline and no longer is",
    "slowdown": "extra time per token relative to the baseline: 0.1 is 10 % more",
}
"""Fields that measure what was lost since a baseline; nothing selects beside them."""
FIELDS = {**SELECTORS, **COUNTED, **MEASURED, **STATED, **LOST}
PHASES = ("prefill", "decode", "run")
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words that a value may be, beyond numbers."""

    provider: Callable[[str], str]
    """A name that the user wrote -> ONNX Runtime's name. Raises UsageError when nobody answers to it."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selector:
    """One condition on nodes, or on the phase."""

    field: str
    equal: bool
    value: str


@dataclass(frozen=True, slots=True)
class Measure:
    """One condition on a number."""

    field: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class Requirement:
    """All of these have to hold."""

    written: str
    """As its user asked for it: --require with the text, or a short form of that."""
    text: str
    selectors: tuple[Selector, ...]
    measures: tuple[Measure, ...]


def short_form(written: str, field: str, sign: str, value: float) -> Requirement:
    """What an option of its own asks for, in the words of a requirement."""
    shown = int(value) if float(value).is_integer() else value
    return Requirement(with_flags(written), f"{field}{sign}{shown}", (), (Measure(field, sign, value),))


def parse_requirement(text: str, words: Vocabulary) -> Requirement:
    """Read `FIELD OP VALUE` conditions, separated by commas. Raises UsageError, which lists what there is."""
    selectors: list[Selector] = []
    measures: list[Measure] = []
    for part in text.split(","):
        found = CONDITION.fullmatch(part)
        if found is None:
            raise UsageError(f"`require={text}`: {part.strip()!r} is not FIELD OP VALUE, as in share>=0.95")
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
    """A condition on nodes."""
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
    """A finite number; one with % is a hundredth."""
    try:
        # In decimals: 96.4 / 100 is another float than 0.964, which a share of 241 in 250 is.
        number = float(Decimal(value.removesuffix("%")) / (100 if value.endswith("%") else 1))
    except ArithmeticError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"`require={text}`: {field} is compared with a number, not {value!r}")
    if field.endswith("share") and not 0 <= number <= 1:
        raise UsageError(f"`require={text}`: {field} is between 0 and 1, or 0% and 100%, not {value}")
    return number


def _check_sense(text: str, selectors: Sequence[Selector], measures: Sequence[Measure]) -> None:
    """Raise UsageError when the conditions together say nothing."""
    if not measures:
        every = ", ".join((*COUNTED, *MEASURED, *STATED, *LOST))
        raise UsageError(f"`require={text}`: nothing is measured; add one of {every}, as in share>=0.95")
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
        raise UsageError(f"`require={text}`: {shares[0]} needs provider or reason, as in provider=cuda,share>=0.95")


def _unknown(word: str, known: Iterable[str], noun: str) -> str:
    """A word that nobody knows, with the nearest one and the list."""
    listed = list(known)
    near = difflib.get_close_matches(word.lower(), listed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {noun} {word!r}{hint}; known: {', '.join(listed)}"
