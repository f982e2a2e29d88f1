"""Dry run against a real GPU, node by node. Without a GPU, only the comparison function is tested."""

from __future__ import annotations

import json

import pytest

from tests.conftest import DEMO_CHECKPOINT, require_dry_run
from tests.contract.cases import cases, only_in
from tests.contract.commands import honoured
from tests.contract.expectations import ENVIRONMENTS
from tests.contract.plans import Report, differences

MODELS = ("demo", "llama", "qwen3", "gemma3_text")
COMBINATIONS = [
    (model, attention, precision)
    for model in MODELS
    for attention in ("gqa", "onnx24")
    for precision in ("fp32", "fp16")
]


def placed(partita, package, report, *options):
    """The report of placing a package on CUDA, with the CPU allowed."""
    honoured(partita("place", package, "--provider", "cuda,cpu", "--report", report, *options))
    return json.loads(report.read_text())


@cases("model, attention, precision", lambda environment: COMBINATIONS if environment is ENVIRONMENTS["cuda"] else [])
def test_dry_run_placement_matches_real_placement(
    environment, model, attention, precision, partita, tiny_checkpoint, exported, tmp_path
):
    require_dry_run()
    checkpoint = DEMO_CHECKPOINT if model == "demo" else tiny_checkpoint(model)
    package = exported(checkpoint, attention=attention, precision=precision)
    real = placed(partita, package, tmp_path / "real.json")
    dry = placed(partita, package, tmp_path / "dry.json", "--dry-run")
    assert differences(real, dry) == []


@cases("_", only_in("main"))
@pytest.mark.heavy
def test_differences_detects_node_copy_and_cache_changes(environment, _, partita, packages, tmp_path):
    """Compares dry runs only: the same package on two devices, and two precisions."""
    require_dry_run()
    one = placed(partita, packages / "llama-gqa-fp32", tmp_path / "a.json", "--dry-run", "--device", "h100")
    same = placed(partita, packages / "llama-gqa-fp32", tmp_path / "b.json", "--dry-run", "--device", "t4")
    other = placed(partita, packages / "llama-gqa-fp16", tmp_path / "c.json", "--dry-run")
    assert differences(one, same) == []
    found = differences(one, other)
    moved = "decode: node model.layers.0.self_attn/GroupQueryAttention: CPUExecutionProvider really, "
    assert moved + "CUDAExecutionProvider in the dry run" in found
    assert any(line.startswith("decode: copy ") for line in found)
    assert any(line.startswith("cache: ") for line in found)


def test_missing_phase_is_a_difference():
    empty: Report = {"phases": [], "cache": None}
    assert differences(empty, {"phases": [{"name": "decode"}], "cache": None})
