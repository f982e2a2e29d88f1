"""What `report check --require` understands: `provider=webgpu,share>=0.95`, read and held against a report. Pure.

A requirement is a list of conditions that all have to hold, in every phase it is about. Some conditions select nodes,
the others measure: those that were selected, or the phase.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.errors import UsageError
from partita.observations.text_format import decimals, listing, name_some, plural, short_provider
from partita.partition_reports.groups import total_us
from partita.partition_reports.node_keys import stands_for
from partita.partition_reports.records import NodePlacement, Phase, Report

SELECTORS = {
    "phase": "prefill, decode or run; without it: every phase",
    "op": "nodes of this operator",
    "module": "nodes of this module, a part of its path: layers.0 or self_attn",
    "provider": "nodes on this provider, by any of its names",
    "reason": "nodes off the wanted provider for this reason",
}
"""Fields that say which nodes are meant; they take = and != only."""
COUNTED = {
    "nodes": "how many nodes of the plan are meant",
    "share": "nodes on `provider`, or with `reason`, as a part of those of `op` and `module`: 0 to 1, or 95%. Nodes of "
    "the file are counted: a compiled one counts as all that it stands for, what ONNX Runtime added is left out",
    "time_share": "the same part of the host time of nodes",
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
FIELDS = {**SELECTORS, **COUNTED, **MEASURED}
PHASES = ("prefill", "decode", "run")
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


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

    text: str
    selectors: tuple[Selector, ...]
    measures: tuple[Measure, ...]


def parse_requirement(text: str, words: Vocabulary) -> Requirement:
    """Read `FIELD OP VALUE` conditions, separated by commas. Raises UsageError, which lists what there is."""
    selectors: list[Selector] = []
    measures: list[Measure] = []
    for part in text.split(","):
        found = CONDITION.fullmatch(part)
        if found is None:
            raise UsageError(f"--require {text}: {part.strip()!r} is not FIELD OP VALUE, as in share>=0.95")
        field, sign, value = found.groups()
        if field in SELECTORS:
            selectors.append(parse_selector(text, field, sign, value, words))
        elif field in FIELDS:
            measures.append(Measure(field, sign, parse_number(text, field, value)))
        else:
            raise UsageError(f"--require {text}: {unknown(field, FIELDS, 'field')}")
    check_sense(text, selectors, measures)
    return Requirement(text, tuple(selectors), tuple(measures))


def parse_selector(text: str, field: str, sign: str, value: str, words: Vocabulary) -> Selector:
    """A condition on nodes."""
    if sign not in ("=", "==", "!="):
        raise UsageError(f"--require {text}: {field} takes = or !=, not {sign}")
    if not value:
        raise UsageError(f"--require {text}: {field} has no value")
    if field == "phase" and value not in PHASES:
        raise UsageError(f"--require {text}: {unknown(value, PHASES, 'phase')}")
    if field == "reason" and value not in words.reasons:
        raise UsageError(f"--require {text}: {unknown(value, words.reasons, 'reason')}")
    return Selector(field, sign != "!=", words.provider(value) if field == "provider" else value)


def parse_number(text: str, field: str, value: str) -> float:
    """A finite number; one with % is a hundredth."""
    try:
        number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--require {text}: {field} is compared with a number, not {value!r}")
    if field.endswith("share") and not 0 <= number <= 1:
        raise UsageError(f"--require {text}: {field} is between 0 and 1, or 0% and 100%, not {value}")
    return number


def check_sense(text: str, selectors: Sequence[Selector], measures: Sequence[Measure]) -> None:
    """Raise UsageError when the conditions together say nothing."""
    if not measures:
        raise UsageError(
            f"--require {text}: nothing is measured; add one of {', '.join((*COUNTED, *MEASURED))}, as in share>=0.95"
        )
    fields = [entry.field for entry in selectors]
    whole = [entry.field for entry in measures if entry.field in MEASURED]
    if whole and set(fields) - {"phase"}:
        extra = listing(field for field in fields if field != "phase")
        raise UsageError(f"--require {text}: {whole[0]} is that of a whole phase; ask for it without {extra}")
    shares = [entry.field for entry in measures if entry.field.endswith("share")]
    if shares and not {"provider", "reason"} & set(fields):
        raise UsageError(f"--require {text}: {shares[0]} needs provider or reason, as in provider=cuda,share>=0.95")


def unknown(word: str, known: Iterable[str], noun: str) -> str:
    """A word that nobody knows, with the nearest one and the list."""
    listed = list(known)
    near = difflib.get_close_matches(word.lower(), listed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {noun} {word!r}{hint}; known: {', '.join(listed)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one measure holds, and what was found."""

    holds: bool
    figure: str
    more: str = ""
    """The nodes because of which it does not hold."""


def find(requirement: Requirement, report: Report) -> list[tuple[bool, str]]:
    """Whether each measure holds, and the figures; phases with the same outcome share a sentence.

    Without a phase that is meant there is one sentence, and it does not hold.
    """
    phases = [phase for phase in report.phases if phase.nodes and about(phase, requirement.selectors)]
    if not phases:
        return [(False, "the report has no such phase with a node in it")]
    alike: dict[Finding, list[str]] = {}
    for measure in requirement.measures:
        for phase in phases:
            alike.setdefault(weigh(requirement, measure, phase, report), []).append(phase.name)
    return [(found.holds, f"{found.figure} in {listing(names)}{found.more}") for found, names in alike.items()]


def about(phase: Phase, selectors: Iterable[Selector]) -> bool:
    """The phase is meant."""
    return all((phase.name == entry.value) == entry.equal for entry in selectors if entry.field == "phase")


def weigh(requirement: Requirement, measure: Measure, phase: Phase, report: Report) -> Finding:
    """One measure in one phase."""
    chosen = Chosen.of(requirement, phase, report)
    value = chosen.measure(measure.field) if measure.field in COUNTED else measure_phase(measure.field, phase)
    if value is None:
        return Finding(False, f"{measure.field} cannot be confirmed", f": {chosen.why_unknown(measure)}")
    holds = COMPARE[measure.sign](value, measure.value)
    shown = f"{value:,.0f}" if value == int(value) and not measure.field.endswith("share") else say(measure, value)
    left_out = phase.bodies.nodes if phase.bodies and measure.field in COUNTED else 0
    bodies = f"; {plural(left_out, 'node')} in bodies of control flow not counted" if left_out else ""
    return Finding(holds, f"{measure.field} {shown}", bodies + ("" if holds else chosen.blame(measure)))


def say(measure: Measure, value: float) -> str:
    """A share with four decimals, so that it can be told from its limit; other numbers with three digits."""
    return f"{value:.4g}" if measure.field.endswith("share") else decimals(value)


def measure_phase(field: str, phase: Phase) -> float | None:
    """A figure of a whole phase."""
    if field == "copies" and phase.bodies is not None:
        inside = phase.bodies.copies
        return None if inside is None else len(phase.copies) + inside
    figures: dict[str, float | None] = {
        "partitions": len(phase.partitions),
        "copies": len(phase.copies),
        "copy_bytes_per_token": phase.cost.copy_bytes_per_token if phase.cost else None,
        "tokens_per_second": phase.tokens_per_second,
        "p50_ms": phase.step_p50_ms,
    }
    return figures[field]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The nodes that a requirement is about, in one phase."""

    base: tuple[NodePlacement, ...]
    """Those of the operator and module."""
    nodes: tuple[NodePlacement, ...]
    """Those of them on the provider, and with the reason."""
    reasons: Mapping[str, str]

    @classmethod
    def of(cls, requirement: Requirement, phase: Phase, report: Report) -> Chosen:
        """Choose."""
        reasons = {entry.node: entry.reason for entry in report.fallbacks if entry.phase == phase.name}
        kinds = [entry for entry in requirement.selectors if entry.field in ("op", "module")]
        places = [entry for entry in requirement.selectors if entry.field in ("provider", "reason")]
        base = tuple(node for node in phase.nodes if all(fits(node, entry, reasons) for entry in kinds))
        return cls(base, tuple(node for node in base if all(fits(node, entry, reasons) for entry in places)), reasons)

    def measure(self, field: str) -> float | None:
        """A figure of the chosen nodes; None when it is not known, or there is nothing to take a part of."""
        if field == "nodes":
            return len(self.nodes)
        if field == "share":
            whole = weight(self.base)
            return weight(self.nodes) / whole if whole else None
        whole_us, part_us = total_us(self.base), total_us(self.nodes) if self.nodes else 0.0
        return part_us / whole_us if whole_us and part_us is not None else None

    def why_unknown(self, measure: Measure) -> str:
        """Why a figure is not there."""
        if measure.field in MEASURED:
            return "the report does not have it"
        return "no time is known" if weight(self.base) else "no node of the file is meant"

    def blame(self, measure: Measure) -> str:
        """The nodes because of which it does not hold: those that are missing, or those that are too many."""
        if measure.field not in COUNTED:
            return ""
        missing = measure.sign in (">", ">=")
        ids = {id(node) for node in self.nodes}
        named = [node for node in self.base if id(node) not in ids] if missing else list(self.nodes)
        if not self.nodes:
            return ": no node is meant" if missing else ""
        return f"{', without' if missing else ':'} {name_some([self.describe(node) for node in named])}"

    def describe(self, node: NodePlacement) -> str:
        """A node, where it is, and why."""
        where = short_provider(node.provider) if node.provider else "an unknown provider"
        why = f": {self.reasons[node.name]}" if node.name in self.reasons else ""
        return f"{node.name} ({node.op_type or 'unknown'} on {where}{why})"


def weight(nodes: Iterable[NodePlacement]) -> int:
    """Nodes of the file behind these."""
    return sum(len(stands_for(node)) for node in nodes if node.replaces or "model_file" in node.sources)


def fits(node: NodePlacement, selector: Selector, reasons: Mapping[str, str]) -> bool:
    """The node is meant. What is not known is neither equal nor unequal to anything."""
    value = {
        "op": node.op_type,
        "module": node.module,
        "provider": node.provider,
        "reason": reasons.get(node.name, ""),
    }[selector.field]
    if value is None:
        return False
    same = f".{selector.value}." in f".{value}." if selector.field == "module" else value == selector.value
    return same == selector.equal
