"""Every kind of report that views are tried on: recorded ones as they were written, and samples made by hand.

`recorded/*.json.gz` are reports of ONNX Runtime 1.24 (OpenVINO), 1.27 (WebGPU over a software driver) and 1.31: of a
random 2-layer llama, in gqa on OpenVINO and on a CUDA dry run and in onnx24 on WebGPU, and of two transformer blocks as
torch's own exporter writes them. Their rows of file nodes were added later.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from partita.partition_reports.groups import with_groups
from partita.partition_reports.phase_records import SubgraphNode, Subgraphs
from partita.partition_reports.records import ModelFacts, ModelInput, Report
from tests.partition_reports import pages, report_changes
from tests.partition_reports.samples import (
    GPU_CHAIN,
    MISSING_FIRST_CHAIN,
    NO_GPU_CHAIN,
    PLAYED,
    mixed_facts,
    recorded_facts,
    report_of,
)

RECORDED = Path(__file__).parent / "recorded"


@cache
def recorded(name: str) -> Report:
    """A recorded report, with its groups computed anew."""
    raw = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    found = Report.model_validate(raw, extra="ignore")
    return found.model_copy(update={"phases": tuple(map(with_groups, found.phases))})


def dry_report() -> Report:
    """A dry run of the hand-made run."""
    return report_of(replace(mixed_facts(), finish_reason=None), GPU_CHAIN, device=PLAYED)


def empty_report() -> Report:
    """A run of which nothing is known."""
    nothing = {"phases": (), "cache": None, "totals": None, "checks": (), "sources": ()}
    return pages.cpu_report().model_copy(update=nothing)


def many_inputs() -> Report:
    """A run of an ONNX file with many inputs, and nodes in control flow."""
    report = report_changes.mixed()
    names = [f"past_key_values.{layer}.key" for layer in range(24)]
    inputs = tuple(ModelInput(name=name, dtype="float32", shape=(1, 8, 0, 64)) for name in names)
    model = ModelFacts(
        file="genai.onnx", sha256="cd" * 32, data_files=(), ir_version=10, opsets={"": 21}, nodes=13, inputs=inputs
    )
    bodies = Subgraphs(nodes=4, on_cpu=(SubgraphNode(name="inner/Add", op_type="Add"),), copies=None)
    phase = report.phases[1].model_copy(update={"name": "run", "subgraphs": bodies})
    decode = (entry for entry in report.fallbacks if entry.phase == "decode")
    fallbacks = tuple(entry.model_copy(update={"phase": "run"}) for entry in decode)
    parts = {"package": None, "model": model, "phases": (phase,), "fallbacks": fallbacks, "totals": None, "cache": None}
    return report.model_copy(update=parts)


REPORTS: dict[str, Callable[[], Report]] = {
    "recorded cpu": pages.cpu_report,
    "recorded webgpu": lambda: recorded("webgpu"),
    "recorded openvino": lambda: recorded("openvino"),
    "recorded cuda dry run": lambda: recorded("cuda_dry_run"),
    "recorded torch export": lambda: recorded("vit_cpu"),
    "mixed": report_changes.mixed,
    "deep": lambda: pages.deep_report(layers=14, repeats=1),
    "refused": pages.refused_report,
    "dry": dry_report,
    "unavailable": lambda: report_of(recorded_facts(), NO_GPU_CHAIN),
    "first of three unavailable": lambda: report_changes.mixed(MISSING_FIRST_CHAIN),
    "moved": lambda: report_changes.moved("lm_head/MatMul"),
    "many inputs": many_inputs,
    "empty": empty_report,
}
"""By name, made when they are asked for."""
