"""The precedence of reasons: one ordered table, with the basis for the place of a row as a comment.

Within a row, the order of the reasons decides. Reasons only yield findings with their bases; this table compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.diagnosis.evidence import GROUNDS, Basis, Context, Finding
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.reasons.table import REASONS
from partita.observations.codes import ReasonCode
from partita.observations.facts import NodeProbe
from partita.observations.records import ChainEntry


@dataclass(frozen=True, slots=True)
class Rank:
    """Findings of these codes on this basis; they precede all later rows."""

    basis: Basis
    codes: tuple[ReasonCode, ...] = ()
    """Empty: every code that no other row of this basis lists."""


PRECEDENCE: tuple[Rank, ...] = (
    Rank("pin"),
    # The node may be on the preferred provider.
    Rank("nowhere"),
    # The provider itself names node and cause.
    Rank("line"),
    Rank("blank_line"),
    # One change isolates the cause; a log line `no kernel` does not distinguish operator, version and type.
    Rank("alone"),
    Rank("together"),
    # Fixed sizes may accompany every other change.
    Rank("together", ("dynamic_shape",)),
    Rank("vague_line"),
    Rank("forms"),
    Rank("alone_said"),
    Rank("alone_left"),
    # A provider that fails on the graph has placed no node.
    Rank("part"),
    # A provider that did not start has placed no node.
    Rank("entry"),
    # A node that ONNX Runtime added is not in the model.
    Rank("origin"),
    Rank("alone", ("no_kernel_op",)),
    Rank("line", ("no_kernel_op",)),
    Rank("alone", ("subgraph_rejected",)),
    Rank("line", ("subgraph_rejected",)),
    Rank("budget"),
    Rank("alone", ("not_claimed",)),
    Rank("line", ("not_claimed",)),
    # A log line without a node name may be about another node of the operator.
    Rank("blank_line", ("no_kernel_op", "subgraph_rejected", "not_claimed")),
    Rank("graph_line"),
    Rank("nothing"),
)


def rank_of(code: str, basis: Basis) -> int:
    """The row of a finding: the row of the basis that lists the code, else the basis's row without codes."""
    rows = [(number, rank) for number, rank in enumerate(PRECEDENCE) if rank.basis == basis]
    own = (number for number, rank in rows if code in rank.codes)
    return next(own, None) or next(number for number, rank in rows if not rank.codes)


def findings(context: Context) -> list[tuple[Reason, Finding]]:
    """Every reason that applies, with its finding, in the order of the table; the first decides.

    `unexplained` always applies.
    """
    applying = [(reason, finding) for reason in REASONS.values() for finding in reason.findings(context)]
    return sorted(applying, key=lambda pair: rank_of(pair[0].code, pair[1].basis))


def explain(context: Context) -> tuple[Reason, Finding]:
    """The reason that decides, and its finding."""
    return findings(context)[0]


def describe_rank(code: str, basis: Basis) -> str:
    """A finding's rank and basis as text, e.g. `rank 5: an experiment on the node in isolation`."""
    if basis not in GROUNDS:  # in a report of another version
        return "unknown rank"
    return f"rank {rank_of(code, basis) + 1}: {GROUNDS[basis]}"


def reason_from_probes(probe: NodeProbe, provider: str) -> tuple[ReasonCode, str] | None:
    """The reason and evidence from experiments on a node with `provider` alone; None if they show no reason."""
    skipped = ChainEntry(provider=provider, status="active")
    reason, finding = explain(Context(probe.node, None, skipped, probe=probe))
    return None if finding.basis == "nothing" else (reason.code, finding.evidence)
