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
from partita.observations.facts import NodeProbe
from partita.observations.names import CPU
from partita.observations.records import ChainEntry


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
    Rank("pin", ("pinned_by_user",), "a pinned node is never offered to the provider"),
    Rank("nowhere", ("unexplained",), "the node may well be on the preferred provider, so nothing is said of why not"),
    Rank(
        "line",
        NAMES_THE_CAUSE,
        "the line names node and cause, and comes from whoever decided: no experiment can be more certain",
    ),
    Rank("blank_line", NAMES_THE_CAUSE, "the same of a node without a name; less certain only in which node it means"),
    Rank(
        "alone",
        ("option_needed", "dynamic_shape", "no_kernel_type", "no_kernel_version", "attribute_unsupported"),
        "one change makes the provider claim the node, which isolates the cause; a line that says no more than `no "
        "kernel` does not tell the operator from its version or its types. Of several such changes, the one that "
        "leaves most of the model as it is: all of it, where an option of the provider does",
    ),
    Rank(
        "together",
        ("no_kernel_type", "no_kernel_version", "attribute_unsupported", "dynamic_shape"),
        "several changes together, and no single one; sizes last, which are fixed along with whatever else is needed",
    ),
    Rank(
        "vague_line",
        ("attribute_unsupported", "no_kernel_type", "no_kernel_version", "dynamic_shape"),
        "the provider rejected the node for this, without the detail: after an experiment that gives it",
    ),
    Rank(
        "forms",
        ("no_kernel_type", "attribute_unsupported"),
        "other nodes of the operator are claimed, so it is not the operator; what it is follows from them, and nothing "
        "done to this node isolates it: after all that says or shows it of the node",
    ),
    Rank("alone_said", ("no_kernel_op",), "the provider names the operator as one it lacks; a part only says where"),
    Rank(
        "alone_left",
        ("no_kernel_op",),
        "that the provider fails over the graph follows from the node that it leaves, as with graph capture",
    ),
    Rank(
        "part",
        ("subgraph_rejected",),
        "a provider that fails on the graph has placed no node, so this explains every node",
    ),
    Rank("entry", (*PROVIDER_CODES, "dynamic_shape"), "the provider is not there, so it has looked at no node"),
    Rank(
        "origin",
        ("runtime_inserted",),
        "nothing about the model's operators helps a node that is not in the file: before what is said of its operator",
    ),
    Rank(
        "alone",
        ("no_kernel_op",),
        "experiments list what was tried in vain; a log line only says that no kernel was found",
    ),
    Rank("line", ("no_kernel_op",), "the line names the node, but not what is missing"),
    Rank("alone", ("subgraph_rejected",), "the provider fails on the node in isolation, and no variation helped"),
    Rank("line", ("subgraph_rejected",), "the provider rejected the subgraph that the node is in"),
    Rank("budget", ("over_budget",), "what `not_claimed` goes by, and a budget that explains it"),
    Rank("alone", ("not_claimed",), "the provider accepts the node in isolation, so its neighbours decide"),
    Rank("line", ("not_claimed",), "the provider says that it did not claim the node, and not why"),
    Rank(
        "blank_line",
        ("no_kernel_op", "subgraph_rejected", "not_claimed"),
        "a line without a name that gives no cause may be about another node of the same operator",
    ),
    Rank("graph_line", ("subgraph_rejected",), "about the graph: that the node is in the rest only follows"),
    Rank("nothing", ("unexplained",), "the fallback when nothing else applies"),
)


@cache
def ranks() -> dict[tuple[ReasonCode, Ground], int]:
    """The place of every finding in the table.

    Raises ValueError when one has two, or none, or when a row stands for what no reason can find.
    """
    places: dict[tuple[ReasonCode, Ground], int] = {}
    for code, ground in ((code, rank.ground) for rank in PRECEDENCE for code in rank.codes):
        if (code, ground) in places:
            raise ValueError(f"{code} by {ground} has two ranks")
        places[code, ground] = len(places)
    found = {(reason.code, ground) for reason in load_reasons() for ground in reason.grounds}
    for pairs, problem in (
        (found - set(places), "has no rank"),
        (set(places) - found, "has a rank and is never found"),
    ):
        if pairs:
            named = ", ".join(f"{code} by {ground}" for code, ground in sorted(pairs))
            raise ValueError(f"{named} {problem} in {__name__}.PRECEDENCE")
    return places


def explain(context: Context) -> tuple[Reason, Finding]:
    """The reason that goes first by the table, and its finding.

    Raises LookupError when no reason answers, which `unexplained` rules out, or when one finds what it does not list in
    `found_on`.
    """
    answers = [(reason, finding) for reason in load_reasons() for finding in reason.findings(context)]
    if not answers:
        raise LookupError(f"{context.node}: no reason applies")
    places = ranks()
    for reason, finding in answers:
        if (reason.code, finding.ground) not in places:
            raise LookupError(f"{reason.code} by {finding.ground} has no rank in {__name__}.PRECEDENCE")
    return min(answers, key=lambda answer: places[answer[0].code, answer[1].ground])


def shown_by(probe: NodeProbe, provider: str) -> tuple[ReasonCode, str] | None:
    """The reason that experiments on a node with `provider` show, with nothing else to go by, and their evidence; None
    where they show none.
    """
    skipped = ChainEntry(provider=provider, status="active")
    reason, finding = explain(Context(probe.node, None, CPU, skipped, exported=True, replaces=(), log=(), probe=probe))
    return None if finding.ground == "nothing" else (reason.code, finding.evidence)
