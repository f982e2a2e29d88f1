"""Grouping of fallbacks into findings by the facts, not by the wording."""

from __future__ import annotations

import pytest

from partita.diagnosis.records import VariantRecord
from partita.partition_reports.records import RejectedPart
from partita.partition_reports.sections.fallbacks import finding_key
from tests.partition_reports.pages import mixed_report

REPORT = mixed_report()
ENTRY = REPORT.fallbacks[0].model_copy(
    update={"reason": "no_kernel_type", "evidence_kind": "probed", "evidence": "no kernel for a", "op_type": "Add"}
)
TRIAL = VariantRecord(
    factor="type", change="float16 in place of float32", outcome="supported", message="", cached=False, after="float16"
)


def test_finding_key_ignores_text_fields() -> None:
    key = finding_key(REPORT)
    update = {"evidence": "nothing runs b", "remedy": "another sentence", "node": "b", "missing_probes": ""}
    assert key(ENTRY) == key(ENTRY.model_copy(update=update))


@pytest.mark.parametrize(
    "update",
    [
        {"reason": "no_kernel_op"},
        {"evidence_kind": "logged"},
        {"op_type": "Mul"},
        {"variants": (TRIAL,)},
        {"preferred_provider": "CUDAExecutionProvider"},
        {"missing_probes": "no time was left"},
    ],
)
def test_finding_key_depends_on_reason_and_evidence(update: dict[str, object]) -> None:
    key = finding_key(REPORT)
    assert key(ENTRY) != key(ENTRY.model_copy(update=update))


@pytest.mark.parametrize(("reason", "kind"), [("not_in_build", "logged"), ("pinned_by_user", "derived")])
def test_provider_level_reasons_ignore_operator_in_finding_key(reason: str, kind: str) -> None:
    one = ENTRY.model_copy(update={"reason": reason, "evidence_kind": kind})
    key = finding_key(REPORT)
    assert key(one) == key(one.model_copy(update={"op_type": "Mul"}))


def test_finding_key_groups_nodes_by_rejected_part() -> None:
    parts = [
        RejectedPart(
            file="m.onnx", provider="CUDAExecutionProvider", nodes=nodes, evidence="no", minimal=True, attempts=1
        )
        for nodes in (("a", "b"), ("c",))
    ]
    key = finding_key(REPORT.model_copy(update={"rejected_parts": tuple(parts)}))
    a, b, c = (ENTRY.model_copy(update={"node": name, "op_type": name.upper()}) for name in "abc")
    assert key(a) == key(b) != key(c)
