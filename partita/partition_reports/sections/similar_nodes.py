"""Groups nodes with equal findings, by data (reason, evidence kind, probes, rejected part) instead of evidence text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from partita.diagnosis.reasons.base import load_reasons
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.partition_reports.records import Report

OPERATOR_EVIDENCE = ("logged", "probed")
"""Kinds of evidence that apply to the operator of a node."""


def finding_key(report: Report) -> Callable[[Fallback], object]:
    """A function that returns the finding of a node for every preferred provider, for grouping."""
    parts = {name: number for number, part in enumerate(report.rejected_parts) for name in part.nodes}

    def key(entry: Fallback) -> object:
        part = parts.get(entry.node)
        about_operator = part is None and any(map(_is_about_operator, entry.preferred))
        return tuple(map(_known, entry.preferred)), part, entry.op_type if about_operator else None

    return key


def _known(why: SkippedProvider) -> object:
    """The finding for one provider, without the texts that Partita writes."""
    trials = tuple((trial.factor, trial.after, trial.outcome, trial.neg_added) for trial in why.variants)
    return why.provider, why.reason, why.evidence_kind, trials, bool(why.missing_probes)


def _is_about_operator(why: SkippedProvider) -> bool:
    return why.evidence_kind in OPERATOR_EVIDENCE and why.reason not in _provider_reasons()


@cache
def _provider_reasons() -> frozenset[str]:
    """Reasons that apply to every node."""
    return frozenset(reason.code for reason in load_reasons() if reason.level == "provider")


def first_of(texts: Iterable[str]) -> str:
    """The first of several texts, with the number of different texts if there are several."""
    different = list(dict.fromkeys(texts))
    return different[0] + (f" (one of {len(different)})" if len(different) > 1 else "")
