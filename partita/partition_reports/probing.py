"""What a report says of the experiments: what they took, what they left open, and which part was rejected."""

from __future__ import annotations

from collections.abc import Sequence

from partita.diagnosis.probe_verdict import unprobed_nodes
from partita.observations.facts import RunFacts, SessionFacts
from partita.observations.records import ChainEntry
from partita.partition_reports.records import Probing, RejectedPart


def find_rejected(sessions: Sequence[SessionFacts], chain: Sequence[ChainEntry]) -> tuple[RejectedPart, ...]:
    """One entry per ONNX file and provider of the chain that does not open it."""
    return tuple(
        RejectedPart(
            file=session.file,
            provider=entry.provider,
            nodes=rejected.nodes,
            evidence=rejected.said,
            minimal=rejected.minimal,
            tries=rejected.tries,
        )
        for session in sessions
        for entry in chain
        if (rejected := session.of(entry.provider).rejected) is not None
    )


def state_probing(facts: RunFacts) -> Probing | None:
    """What the experiments took; None when there were none."""
    took = facts.probing
    if took is None:
        return None
    return Probing(
        seconds=took.seconds,
        budget_seconds=took.budget_seconds,
        experiments=took.experiments,
        cached=took.cached,
        crashes=took.crashes,
        unprobed=tuple(
            dict.fromkeys(
                name
                for session in facts.sessions
                for known in session.providers.values()
                for name in unprobed_nodes(known.probes)
            )
        ),
    )
