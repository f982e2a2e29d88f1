"""Support tables from answers that are made up."""

from __future__ import annotations

from typing import Any

from partita.support.build import build_table
from partita.support.records import Measurement, Measurements, ProviderFacts, SupportTable, Versions


def answer(operator: str, outcome: str, *types: str, kind: str = "types", **given: Any) -> Measurement:
    """One answer; types are written T=tensor(float)."""
    pairs = tuple((text.partition("=")[0], text.partition("=")[2]) for text in types)
    made = {"domain": "", "since": 13, "until": None, "difference": "", "factors": frozenset(), "message": "", **given}
    return Measurement(operator=operator, kind=kind, types=pairs, outcome=outcome, **made)  # type: ignore[arg-type]


def form(operator: str, outcome: str, *factors: str, **given: Any) -> Measurement:
    """One form with its factors."""
    return answer(operator, outcome, "T=tensor(float)", kind="form", factors=frozenset(factors), **given)


def table(*answers: Measurement, **given: Any) -> SupportTable:
    """The table of these answers."""
    measured = {
        "model_nodes": (),
        "without_example": (),
        "untested_counts": (),
        "newest_opset": 26,
        "sessions": 3,
        "crashes": 0,
        "seconds": 1.5,
        "complete": True,
    }
    provider = ProviderFacts(
        name="webgpu", ort_name="WebGpuExecutionProvider", plugin=None, options={}, device=None, devices=("GPU of X",)
    )
    versions = Versions(
        onnxruntime="1.27.0",
        onnxruntime_package=given.pop("package", "onnxruntime-webgpu 1.27.0"),
        onnxruntime_build="b",
        onnx="1.23.2",
        opset=26,
        cpu="c",
        operating_system="o",
    )
    return build_table(
        Measurements(results=answers, **{**measured, **given}),
        provider=provider,
        versions=versions,
        scope="all operators",
        created="2026-11-22T00:00:00+00:00",
        partita_version="0",
        budget_seconds=300.0,
    )
