"""Nodes that a chain refuses, as an error carries them, and how their package could be made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

from partita.diagnosis.records import Fallback
from partita.errors import RefusedNode, Refusing
from partita.remedies import Remedy
from partita.runtime.advice import export_anew


def anew_for(path: Path, nodes: Sequence[RefusedNode]) -> Remedy | None:
    """How the package can be made anew for the first provider of the chain that was asked and for which that helps."""
    reasons: dict[str, Counter[str]] = {}
    for entry in (entry for node in nodes for entry in node.asked):
        reasons.setdefault(entry.provider, Counter())[entry.reason] += 1
    found = (export_anew(path, [code for code, _ in codes.most_common()], name) for name, codes in reasons.items())
    return next((remedy for remedy in found if remedy is not None), None)


def rows_of(fallbacks: Sequence[Fallback], active: Container[str]) -> tuple[RefusedNode, ...]:
    """Nodes off the chain, as an error carries them. `active`: providers of the chain that are there."""
    return tuple(
        RefusedNode(
            node=entry.node,
            op_type=entry.op_type,
            module=entry.module,
            wanted=entry.wanted,
            provider=entry.provider,
            reason=entry.reason,
            evidence_kind=entry.evidence_kind,
            evidence=entry.evidence,
            remedy=entry.remedy,
            available=entry.wanted in active,
            skipped=tuple(
                Refusing(
                    provider=each.provider,
                    reason=each.reason,
                    evidence_kind=each.evidence_kind,
                    evidence=each.evidence,
                    remedy=each.remedy,
                    available=each.provider in active,
                )
                for each in entry.skipped
            ),
        )
        for entry in fallbacks
    )
