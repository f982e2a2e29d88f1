"""Which reason a node gets when several apply: one ordered table, each row with why it stands where it stands.

A reason is its file in `reasons/` and its row here. Reasons state what they find and on which ground; only this table
compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from partita.diagnosis.evidence import Context, Finding, Ground
from partita.diagnosis.reasons.base import Reason, load_reasons
from partita.observations.codes import PROVIDER_CODES, ReasonCode


@dataclass(frozen=True, slots=True)
class Rank:
    """Findings of these codes on this ground: before all that stands below, and the first code before the others."""

    ground: Ground
    codes: tuple[ReasonCode, ...]
    because: str


NAMES_THE_CAUSE: tuple[ReasonCode, ...] = (
    "pinned_by_user",
    "over_budget",
    "attribute_unsupported",
    "dynamic_shape",
    "no_kernel_type",
    "no_kernel_version",
    "cpu_preferred",
)
PRECEDENCE: tuple[Rank, ...] = (
    Rank("pin", ("pinned_by_user",), "a pinned node is never offered to the provider, whatever it would say of it"),
    Rank("line", NAMES_THE_CAUSE, "node and cause in one line, from whoever decided: no experiment knows better"),
    Rank("blank_line", NAMES_THE_CAUSE, "the same of a node without a name; less certain only in which node it means"),
    Rank(
        "alone",
        ("attribute_unsupported", "dynamic_shape", "no_kernel_type", "no_kernel_version"),
        "one change makes the provider take the node, which isolates the cause; a line that says no more than `no "
        "kernel` does not tell the operator from its version or its types",
    ),
    Rank("alone_said", ("no_kernel_op",), "the provider names the operator as one it lacks; a part only says where"),
    Rank(
        "part", ("subgraph_rejected",), "a provider that fails over the graph has placed no node, so this is all of it"
    ),
    Rank("entry", (*PROVIDER_CODES, "dynamic_shape"), "the provider is not there, so it has looked at no node"),
    Rank(
        "origin",
        ("runtime_inserted",),
        "nothing about the model's operators helps a node that is not in the file: before what is said of its operator",
    ),
    Rank("line", ("runtime_inserted",), "as above, in the provider's words"),
    Rank("alone", ("no_kernel_op",), "experiments say what was tried in vain; a line only that no kernel was found"),
    Rank("line", ("no_kernel_op",), "the line names the node, but not what is missing"),
    Rank("alone", ("subgraph_rejected",), "the provider fails over the node alone, and no change helped"),
    Rank("line", ("subgraph_rejected",), "the provider turned down what the node is in"),
    Rank("budget", ("over_budget",), "what `not_claimed` goes by, and a budget that explains it"),
    Rank("alone", ("not_claimed",), "the provider takes the node alone, so it is what stands around it"),
    Rank("line", ("not_claimed",), "the provider says that it did not claim the node, and not why"),
    Rank(
        "blank_line",
        ("runtime_inserted", "no_kernel_op", "subgraph_rejected", "not_claimed"),
        "a line without a name that gives no cause may be about another node of the same operator",
    ),
    Rank("graph_line", ("subgraph_rejected",), "about the graph: that the node is in the rest only follows"),
    Rank("nothing", ("unexplained",), "an honest answer, and the last"),
)


@cache
def ranks() -> dict[tuple[ReasonCode, Ground], int]:
    """The place of every finding in the table. Raises ValueError when one has two."""
    places: dict[tuple[ReasonCode, Ground], int] = {}
    for code, ground in ((code, rank.ground) for rank in PRECEDENCE for code in rank.codes):
        if (code, ground) in places:
            raise ValueError(f"{code} by {ground} has two ranks")
        places[code, ground] = len(places)
    return places


def explain(context: Context) -> tuple[Reason, Finding]:
    """The reason that goes first by the table, and its finding.

    Raises LookupError when no reason answers, which `unexplained` rules out, or when a finding has no rank.
    """
    answers = [(reason, finding) for reason in load_reasons() for finding in reason.findings(context)]
    if not answers:
        raise LookupError(f"{context.node}: no reason applies")
    places = ranks()
    for reason, finding in answers:
        if (reason.code, finding.ground) not in places:
            raise LookupError(f"{reason.code} by {finding.ground} has no rank in {__name__}.PRECEDENCE")
    return min(answers, key=lambda answer: places[answer[0].code, answer[1].ground])
