"""Dry run against a real GPU, node by node."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.conftest import DEMO_CHECKPOINT, require_dry_run
from tests.contract.cases import cases
from tests.contract.commands import honoured

COMBINATIONS = list(product(("demo", "llama", "qwen3", "gemma3_text"), ("gqa", "onnx24"), ("fp32", "fp16")))


def placed(partita, package, report, *options) -> dict[str, Any]:
    """Of each phase, the provider of every node, and the bytes of every copy by direction and tensor or port; and the
    memories of the cache. Names of Memcpy nodes have numbers of the plan, and are left out.
    """
    honoured(partita("place", package, "--provider", "cuda,cpu", "--report", report, *options))
    content = json.loads(report.read_text())
    found: dict[str, Any] = {"cache": content["cache"] and content["cache"]["memories"]}
    for phase in content["phases"]:
        nodes = {node["name"]: node["provider"] for node in phase["nodes"] if not node["name"].startswith("Memcpy")}
        copies = {(each["direction"], each.get("tensor") or each["name"]): each for each in phase["copies"]}
        found[phase["name"]] = nodes, {key: each["bytes_per_run"] for key, each in copies.items()}
    return found


@cases("model, attention, precision", lambda environment: COMBINATIONS if environment.name == "cuda" else [])
def test_dry_run_placement_matches_real_placement(
    environment, model, attention, precision, partita, tiny_checkpoint, exported, tmp_path
):
    require_dry_run()
    checkpoint = DEMO_CHECKPOINT if model == "demo" else tiny_checkpoint(model)
    package = exported(checkpoint, attention=attention, precision=precision)
    real = placed(partita, package, tmp_path / "real.json")
    assert real == placed(partita, package, tmp_path / "dry.json", "--dry-run")
