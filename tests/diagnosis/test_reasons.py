"""Reasons and their precedence: each explains its example, and the strongest evidence decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from partita.diagnosis.evidence import Context
from partita.diagnosis.probe_conclusions import CAUSES, Finding
from partita.diagnosis.reasons import PRECEDENCE, RANKS, REASONS, findings
from partita.diagnosis.sources import lines_by_node
from partita.observations.codes import CODES, PROVIDER_CODES, ReasonCode
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry
from partita.providers.resolve import known_providers
from tests.diagnosis.reason_examples import EXAMPLES, LEFT, TAKEN
from tests.partition_reports.samples import GPU, NO_KERNEL, PATTERNS, PREFERRED

GATHER = "model.rotary_emb/Gather"


def context(**changes: Any) -> Context:
    plain = Context(GATHER, "Gather", ChainEntry(provider=GPU, status="active"), patterns=PATTERNS)
    return replace(plain, **changes)


def decide(given: Context) -> Finding:
    return findings(given)[0]


def probe(*trials: ProbeRun, missing: str = "") -> NodeProbe:
    return NodeProbe(GATHER, trials, missing)


def test_every_code_and_basis_has_its_rows():
    assert tuple(REASONS) == CODES, "within a rank, the order of the reasons decides"
    assert set(EXAMPLES) == set(CODES)
    assert {rank.basis for rank in PRECEDENCE if rank.ground} == {rank.basis for rank in PRECEDENCE}
    assert len(RANKS) == sum(len(rank.codes) or 1 for rank in PRECEDENCE)


@pytest.mark.parametrize("code", REASONS)
def test_reason_explains_its_example(code: ReasonCode):
    found = decide(EXAMPLES[code])
    assert found.code == code and found.evidence and "\n" not in found.evidence


def test_every_provider_pattern_can_yield_a_finding() -> None:
    """These reasons examine the graph, a failure or a budget."""
    without_name = ("subgraph_rejected", "no_kernel_op", "over_budget")
    for provider in known_providers().values():
        for pattern in provider.node_patterns:
            assert pattern.reason not in PROVIDER_CODES, pattern
            assert pattern.names_node or pattern.reason in without_name, pattern
        assert all(pattern.reason not in PROVIDER_CODES for pattern in provider.message_patterns)
        for pattern in provider.start_patterns:
            assert pattern.reason in PROVIDER_CODES, pattern


INT32 = probe(LEFT, ProbeRun("type", "int32 in place of int64", "supported", ""))
TRANSPOSE = {"node": "Transpose", "op_type": "Transpose"}
NO_TRANSPOSE = NO_KERNEL.replace("Gather", "Transpose").replace("model.rotary_emb/Transpose", "Transpose")
NOT_TYPE = ProbeRun("type", "float32 in place of int64", "rejected", "")
TRUSTED = {"node": "model.rotary_emb/Concat", "op_type": "Concat", "log": (PREFERRED,)}
BLANK = NO_KERNEL.replace(GATHER, "")
VAGUE = {
    "log": (f"CUDA kernel not supported: {GATHER}",),
    "patterns": (LogPattern("attribute_unsupported", r"not supported: (?P<node>\S+)$", vague=True),),
}
WITHOUT = ProbeRun("attribute", "without clip=3", "supported", "", removes=True)
# Fields of the node; the reason that decides, and its basis.
DECIDING: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "unexplained", "nothing"),
    "cause in an experiment over a line": ({"log": (NO_KERNEL,), "probe": INT32}, "no_kernel_type", "alone"),
    "line over support in isolation": ({"log": (NO_KERNEL,), "probe": probe(TAKEN)}, "no_kernel_op", "line"),
    "budget over support in isolation": (
        {"probe": probe(TAKEN), "budget": "cuda.memory_budget_kb=1"},
        "over_budget",
        "budget",
    ),
    "pin": ({"log": (NO_KERNEL,), "pin": "cpu:Gather"}, "pinned_by_user", "pin"),
    "added while others were rewritten": (
        {"is_added": True, "rewritten_with": ("a",), "log": (NO_KERNEL,), "probe": probe(TAKEN)},
        "runtime_inserted",
        "origin",
    ),
    "added, with a line with the cause": (
        {**TRANSPOSE, "is_added": True, "log": (PREFERRED.replace("model.rotary_emb/Concat", "Transpose"),)},
        "cpu_preferred",
        "line",
    ),
    "added, with a line without the cause": (
        {**TRANSPOSE, "is_added": True, "log": (NO_TRANSPOSE,)},
        "runtime_inserted",
        "origin",
    ),
    "not added, with a line without the cause": ({**TRANSPOSE, "log": (NO_TRANSPOSE,)}, "no_kernel_op", "line"),
    "line about a node that it replaces": (
        {"node": f"{GATHER}/SplitFusion", "is_added": True, "replaces": (GATHER,), "log": (NO_KERNEL,)},
        "no_kernel_op",
        "line",
    ),
    "line with a name with spaces": (
        {"node": "my gather", "log": (NO_KERNEL.replace(GATHER, "my gather"),)},
        "no_kernel_op",
        "line",
    ),
    "line with a longer name": (
        {"node": "my", "log": (NO_KERNEL.replace(GATHER, "my gather"),)},
        "unexplained",
        "nothing",
    ),
    "line without a name": ({"blank_log": BLANK}, "no_kernel_op", "blank_line"),
    "support in isolation over a line without a name": (
        {"blank_log": BLANK, "probe": probe(TAKEN)},
        "not_claimed",
        "alone",
    ),
    "vague line": (VAGUE, "attribute_unsupported", "vague_line"),
    "experiment over a vague line": ({**VAGUE, "probe": probe(LEFT, WITHOUT)}, "attribute_unsupported", "alone"),
    **{
        f"change of {factor} over a line": (
            {"log": (NO_KERNEL,), "probe": probe(LEFT, ProbeRun(factor, "another", "supported", ""))},
            code,
            "alone",
        )
        for factor, code in CAUSES.items()
    },
    **{
        f"line with the cause over {name}": ({**TRUSTED, "probe": made}, "cpu_preferred", "line")
        for name, made in (("a change", INT32), ("no effect", probe(LEFT, NOT_TYPE)), ("support", probe(TAKEN)))
    },
    "line over incomplete experiments": (
        {"log": (NO_KERNEL,), "probe": probe(LEFT, missing="the time was up")},
        "no_kernel_op",
        "line",
    ),
    "no effect over a line": ({"log": (NO_KERNEL,), "probe": probe(LEFT, NOT_TYPE)}, "no_kernel_op", "alone"),
    "rejection with the provider's line is no failure": (
        {"probe": probe(replace(LEFT, message=NO_KERNEL), NOT_TYPE)},
        "no_kernel_op",
        "alone",
    ),
    **{
        f"message without effect of changes: {message}": (
            {
                "message_patterns": known_providers()["qnn"].message_patterns,
                "probe": probe(replace(LEFT, message=message), NOT_TYPE),
            },
            code,
            basis,
        )
        for message, code, basis in (
            ("QNN expects 2x2 Inverse Op: [..., 2, 2]", "attribute_unsupported", "alone_said"),
            ("Gelu filtered off QNN by the op_affinity provider option", "option_needed", "alone_said"),
            ("Operators of type `Erf` are not supported by QNN EP", "no_kernel_op", "alone"),
            ("it is not among the nodes that the provider supports", "no_kernel_op", "alone"),
        )
    },
    "unavailable without evidence": (
        {"skipped": ChainEntry(provider=GPU, status="unavailable", reason="library_missing")},
        "unexplained",
        "nothing",
    ),
}


@pytest.mark.parametrize("case", DECIDING)
def test_first_applicable_row_decides(case: str) -> None:
    changes, code, basis = DECIDING[case]
    found = decide(context(**changes))
    assert (found.code, found.basis) == (code, basis)
    if found.kind == "probed":
        assert "--probe-seconds" not in (found.remedy or REASONS[code].remedy), "they were made"


@pytest.mark.parametrize("op_type", ["MemcpyFromHost", "MemcpyToHost", "Cast", "DequantizeLinear", "QuantizeLinear"])
def test_runtime_inserted_nodes_are_recognised(op_type):
    assert decide(context(node="added", op_type=op_type, is_added=True)).code == "runtime_inserted"


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"too dark for (?P<node>\S+): (?P<why>.+)", "too dark for {}: new moon"),
        (r"too dark for '(?P<node>[^']+)'", "too dark for '{}' tonight"),
        (r"too dark for \[(?P<node>\S+)\]", "too dark for [{}]"),
        (r"too dark for (?P<node>\S+)", "too dark for {}"),
        (r"too dark for (?P<node>\S+), (?P<why>.+)", "too dark for {}, as ever"),
    ],
)
def test_pattern_matches_only_the_whole_node_name(pattern, line):
    patterns = (LogPattern("cpu_preferred", pattern),)
    for name, told in ((GATHER, True), (f"{GATHER}_1", False)):
        said = line.format(name)
        log = lines_by_node((said,), (GATHER, f"{GATHER}_1")).get(GATHER, ())
        for lines in (log, (said,)):
            assert (decide(context(log=lines, patterns=patterns)).code == "cpu_preferred") == told
