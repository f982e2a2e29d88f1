"""Rejected parts of the graphs."""

from __future__ import annotations

from collections.abc import Sequence

from partita.observations.facts import SessionFacts
from partita.observations.records import ChainEntry
from partita.partition_reports.records import RejectedPart


def find_rejected(sessions: Sequence[SessionFacts], chain: Sequence[ChainEntry]) -> tuple[RejectedPart, ...]:
    """One entry per ONNX file, rejecting provider of the chain, and rejected part."""
    return tuple(
        RejectedPart.copy_of(part, file=session.file, provider=entry.provider, evidence=part.message)
        for session in sessions
        for entry in chain
        if (rejected := session.of(entry.provider).rejected) is not None
        for part in rejected.parts
    )
