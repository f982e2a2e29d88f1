"""Which nodes share a finding: those of which the same is known, whatever sentence says it.

A node's evidence names the node, and is said otherwise in another version of Partita; so what is shown once is decided
by data: kind, reason, experiments, and the part of the graph that was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from partita.diagnosis.reasons.base import load_reasons
from partita.diagnosis.records import Fallback, Skipped
from partita.partition_reports.records import Report

SPEAK_OF_OPERATORS = ("logged", "probed")
"""Kinds of evidence about a node that are about its operator."""


def finding_key(report: Report) -> Callable[[Fallback], object]:
    """What is known of a node of this report, for every preferred provider: nodes with the same share a finding."""
    parts = {name: number for number, part in enumerate(report.rejected) for name in part.nodes}

    def key(entry: Fallback) -> object:
        part = parts.get(entry.node)
        about_operator = part is None and any(map(_speaks_of_operator, entry.preferred))
        return tuple(map(_known, entry.preferred)), part, entry.op_type if about_operator else None

    return key


def _known(why: Skipped) -> object:
    """What is known of one provider, without a word of ours."""
    trials = tuple((trial.factor, trial.now, trial.outcome, trial.company) for trial in why.trials)
    return why.provider, why.reason, why.evidence_kind, trials, bool(why.unprobed)


def _speaks_of_operator(why: Skipped) -> bool:
    return why.evidence_kind in SPEAK_OF_OPERATORS and why.reason not in _reasons_of_providers()


@cache
def _reasons_of_providers() -> frozenset[str]:
    """Reasons that are the same for every node."""
    return frozenset(reason.code for reason in load_reasons() if reason.level == "provider")


def first_of(texts: Iterable[str]) -> str:
    """The first of several texts, and how many different ones there are when that is more than one."""
    different = list(dict.fromkeys(texts))
    return different[0] + (f" (one of {len(different)})" if len(different) > 1 else "")
