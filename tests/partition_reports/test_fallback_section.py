"""Fallbacks as sentences and findings: missing feature, operator and supported alternative; grouping by the facts."""

from __future__ import annotations

import pytest

from partita.diagnosis.records import Fallback, VariantRecord
from partita.partition_reports.sections.fallbacks import finding_key, reason_text
from tests.partition_reports.report_changes import mixed


def fallback(reason: str, op_type: str, *trials: tuple[str, str, str, str]) -> Fallback:
    """A node on the CPU; of each trial: factor, what it has then, what it had before, outcome."""
    return Fallback.model_validate(
        {
            "phase": "run",
            "node": op_type,
            "op_type": op_type,
            "preferred_provider": "CUDAExecutionProvider",
            "provider": "CPUExecutionProvider",
            "reason": reason,
            "evidence_kind": "probed",
            "evidence": "",
            "remedy": "",
            "module": None,
            "source_line": None,
            "variants": [
                {"factor": factor, "change": "", "outcome": outcome, "message": "", "cached": False}
                | {"after": now, "before": before}
                for factor, now, before, outcome in trials
            ],
        }
    )


HALF = ("type", "float16", "float32", "supported")
BFLOAT = ("type", "bfloat16", "float32", "placed")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [fallback("no_kernel_type", "GroupQueryAttention", HALF, BFLOAT, ("type", "int8", "float32", "rejected"))],
            "CUDA has no float32 kernel for GroupQueryAttention; float16 and bfloat16 work",
        ),
        (
            [fallback("no_kernel_type", "MatMul", HALF, BFLOAT), fallback("no_kernel_type", "Gemm", HALF)],
            "CUDA has no float32 kernel for MatMul and Gemm; float16 works",
        ),
        (
            [
                fallback("no_kernel_type", "MatMul", HALF),
                fallback("no_kernel_type", "Gemm", ("type", "float32", "int64", "supported")),
            ],
            "No kernel for the type",
        ),
        (
            [
                fallback(
                    "no_kernel_version",
                    "MaxPool",
                    *(("opset", f"MaxPool of opset {n}", "22", "supported") for n in (12, 11, 10, 8)),
                )
            ],
            "CUDA has no kernel for MaxPool of opset 22; MaxPool of opset 12, 11, 10 and 1 more work",
        ),
        ([fallback("no_kernel_type", "MatMul")], "No kernel for the type"),
        ([fallback("no_kernel_op", "Celu"), fallback("no_kernel_op", "Det")], "CUDA has no kernel for Celu and Det"),
        ([fallback("of_a_later_version", "Celu")], "of_a_later_version"),
    ],
)
def test_reason_text_describes_missing_kernel_for_operator(entries: list[Fallback], said: str) -> None:
    assert reason_text(entries) == said


# Findings

REPORT = mixed()
ENTRY = REPORT.fallbacks[0].model_copy(
    update={"reason": "no_kernel_type", "evidence_kind": "probed", "evidence": "no kernel for a", "op_type": "Add"}
)
TRIAL = VariantRecord(
    factor="type", change="float16 in place of float32", outcome="supported", message="", cached=False, after="float16"
)


@pytest.mark.parametrize(
    ("update", "same"),
    [
        ({"evidence": "nothing runs b", "remedy": "another sentence", "node": "b", "missing_probes": ""}, True),
        ({"reason": "no_kernel_op"}, False),
        ({"evidence_kind": "logged"}, False),
        ({"op_type": "Mul"}, False),
        ({"variants": (TRIAL,)}, False),
        ({"preferred_provider": "CUDAExecutionProvider"}, False),
        ({"missing_probes": "no time was left"}, False),
    ],
)
def test_finding_key_depends_on_facts_and_not_on_texts(update: dict[str, object], same: bool) -> None:
    key = finding_key(REPORT)
    assert (key(ENTRY) == key(ENTRY.model_copy(update=update))) is same
