"""Reasons: each explains its example, and the strongest evidence wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons import REASONS, ROWS, explain
from partita.diagnosis.sources import lines_by_node
from partita.observations.codes import CODES
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry
from tests.diagnosis.reason_examples import EXAMPLES
from tests.partition_reports.samples import GPU, NO_KERNEL, PATTERNS, PREFERRED

GATHER = "model.rotary_emb/Gather"


def context(**changes) -> Context:
    plain = Context(GATHER, "Gather", ChainEntry(provider=GPU, status="active"), patterns=PATTERNS)
    return replace(plain, **changes)


def test_every_code_has_a_row_and_an_example():
    assert tuple(reason.code for reason in ROWS) == CODES
    assert set(EXAMPLES) == set(CODES)


@pytest.mark.parametrize("code", REASONS)
def test_reason_explains_its_example(code):
    reason, finding = explain(EXAMPLES[code])
    assert reason.code == code
    assert finding.evidence
    assert "\n" not in finding.evidence


@pytest.mark.parametrize("code", sorted(set(REASONS) - {"unexplained"}))
def test_reason_without_evidence_has_no_finding(code):
    assert not list(REASONS[code].findings(context()))


def test_log_line_overrides_reason_derived_from_name():
    made_up = context(node="Transpose", op_type="Transpose", is_added=True)
    assert explain(made_up)[0].code == "runtime_inserted"
    line = PREFERRED.replace("model.rotary_emb/Concat", "Transpose")
    assert explain(replace(made_up, log=(line,)))[0].code == "cpu_preferred"


def test_missing_kernel_is_no_cause_for_inserted_node():
    """ONNX Runtime inserted the node, so no change to the model's operators would help."""
    line = NO_KERNEL.replace("Gather", "Transpose").replace("model.rotary_emb/Transpose", "Transpose")
    made_up = context(node="Transpose", op_type="Transpose", is_added=True, log=(line,))
    assert explain(made_up)[0].code == "runtime_inserted"
    assert explain(replace(made_up, is_added=False))[0].code == "no_kernel_op"


def test_log_line_about_replaced_node_explains_fused_node():
    fused = context(node=f"{GATHER}/GatherSliceToSplitFusion", is_added=True, replaces=(GATHER,), log=(NO_KERNEL,))
    assert explain(fused)[0].code == "no_kernel_op"


@pytest.mark.parametrize(
    ("node", "op_type"),
    [
        ("Memcpy", "MemcpyFromHost"),
        ("Memcpy_token_12", "MemcpyToHost"),
        ("InsertedPrecisionFreeCast_x", "Cast"),
        ("DequantizeLinear_token_16", "DequantizeLinear"),
        ("QuantizeLinear", "QuantizeLinear"),
        ("dq/duplicated", "DequantizeLinear"),
        ("where_dummy_dq", "DequantizeLinear"),
    ],
)
def test_runtime_inserted_nodes_are_recognised(node, op_type):
    assert explain(context(node=node, op_type=op_type, is_added=True))[0].code == "runtime_inserted"


def test_name_with_spaces_is_matched_whole():
    line = NO_KERNEL.replace(GATHER, "my gather")
    assert explain(context(node="my gather", log=(line,)))[0].code == "no_kernel_op"
    assert explain(context(node="my", log=(line,)))[0].code == "unexplained"


def test_a_provider_reason_without_evidence_is_unexplained():
    entry = ChainEntry(provider=GPU, status="unavailable", reason="library_missing")
    assert explain(context(skipped=entry))[0].code == "unexplained"


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
        found = explain(context(log=log, patterns=patterns))[0]
        assert (found.code == "cpu_preferred") == told
        assert (explain(context(log=(said,), patterns=patterns))[0].code == "cpu_preferred") == told


@pytest.mark.parametrize("line", [NO_KERNEL, PREFERRED])
def test_log_line_about_longer_name_is_no_evidence(line):
    about = context(log=(line.replace(GATHER, f"{GATHER}_1").replace("Concat", "Gather_1"),))
    assert explain(about)[0].code == "unexplained"
