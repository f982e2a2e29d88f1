"""Precedence table of reasons: complete and applied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.diagnosis.evidence import GROUNDS, names_a_node
from partita.diagnosis.reasons import PRECEDENCE, REASONS, explain
from partita.observations.codes import CODES, PROVIDER_CODES
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.patterns import LogPattern
from partita.providers.resolve import known_providers
from tests.diagnosis.test_reasons import GATHER, context
from tests.partition_reports.samples import NO_KERNEL

TAKEN_ALONE = NodeProbe(GATHER, (ProbeRun("as_is", "", "supported", ""),))
TAKEN_AS_INT32 = NodeProbe(
    GATHER, (ProbeRun("as_is", "", "rejected", ""), ProbeRun("type", "int32 in place of int64", "supported", ""))
)


def test_every_basis_has_default_row_and_unique_codes() -> None:
    assert {rank.basis for rank in PRECEDENCE if not rank.codes} == set(GROUNDS)
    assert len({(rank.basis, code) for rank in PRECEDENCE for code in rank.codes or ("",)}) == sum(
        len(rank.codes) or 1 for rank in PRECEDENCE
    )
    assert tuple(REASONS) == CODES, "within a row, the order of the reasons decides"


def test_every_provider_pattern_can_yield_a_finding() -> None:
    """Reasons that examine the graph, a failure or a budget read the patterns without a node name."""
    for provider in known_providers().values():
        for pattern in provider.node_patterns:
            assert names_a_node(pattern) or REASONS[pattern.reason].find is not None, pattern
        for pattern in provider.start_patterns:
            assert pattern.reason in PROVIDER_CODES, pattern


def test_node_pattern_rejects_provider_level_reason() -> None:
    with pytest.raises(ValueError, match="library_missing is a provider-level reason"):
        LogPattern("library_missing", r"no library for (?P<node>\S+)")


# Each case is one node for which several reasons apply, and the one that goes first.
CASES = {
    "an experiment that isolates the cause, before a line that does not": (
        context(log=(NO_KERNEL,), probe=TAKEN_AS_INT32),
        "no_kernel_type",
    ),
    "a line about the node, before an experiment in which it is taken": (
        context(log=(NO_KERNEL,), probe=TAKEN_ALONE),
        "no_kernel_op",
    ),
    "a budget, before what stands around the node": (
        context(probe=TAKEN_ALONE, budget="cuda.memory_budget_kb=1"),
        "over_budget",
    ),
    "a pin, before all that the provider says": (context(log=(NO_KERNEL,), pin="cpu:Gather"), "pinned_by_user"),
    "that ONNX Runtime added it, before what is said of its operator": (
        context(is_added=True, rewritten_with=("a",), log=(NO_KERNEL,), probe=TAKEN_ALONE),
        "runtime_inserted",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_applicable_row_decides(case: str) -> None:
    given, code = CASES[case]
    assert explain(given)[0].code == code


def test_log_line_without_name_yields_to_probe() -> None:
    """A line with a blank name may be about another node of the same operator."""
    blank = NO_KERNEL.replace(GATHER, "")
    nameless = context(blank_log=blank)
    assert explain(nameless)[0].code == "no_kernel_op"
    assert explain(replace(nameless, probe=TAKEN_ALONE))[0].code == "not_claimed"


VAGUE = LogPattern("attribute_unsupported", r"not supported: (?P<node>\S+)$", vague=True)


def test_vague_log_line_yields_to_specific_probe() -> None:
    lines = ("CUDA kernel not supported: planted",)
    told = context(node="planted", log=lines, patterns=(VAGUE,))
    reason, finding = explain(told)
    assert (reason.code, finding.kind, finding.basis) == ("attribute_unsupported", "logged", "vague_line")
    trials = (
        ProbeRun("as_is", "", "rejected", ""),
        ProbeRun("attribute", "without clip=3", "supported", "", removes=True),
    )
    reason, finding = explain(replace(told, probe=NodeProbe("planted", trials)))
    assert (reason.code, finding.kind) == ("attribute_unsupported", "probed") and "clip=3" in finding.evidence
