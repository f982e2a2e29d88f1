"""Kernel paths of providers: names from the profile and the log; slow paths with cause and remedy."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tests import kernel_models as models
from tests.conftest import require_dry_run
from tests.contract.cases import cases, only_in
from tests.contract.commands import honoured

DEVICE: dict[str, tuple[Any, str]] = {
    "packed": (models.packed, "int8 products (DP4A)"),
    "packed, float": (partial(models.packed, level=None), "float products"),
    "packed, float, many rows": (partial(models.packed, level=None, rows=40), "float products, wide tiles"),
    "prompt": (models.grouped, "flash"),
    "token": (partial(models.grouped, tokens=1, past=20), "flash, split over the cache"),
    "smooth": (partial(models.grouped, smooth_softmax=1), "unfused"),
    "sink": (partial(models.grouped, extra="sink"), "flash"),
    "heads": (models.multi_head, "flash"),
    "layout": (models.convolution, "NHWC layout"),
}
"""Model -> path on WebGPU. A sink of zeros is the remedy of smooth_softmax."""


@cases("target", lambda environment: [(t,) for t in environment.targets if t.provider == "webgpu"])
def test_webgpu_programs_name_kernel_paths(environment, target, partita, tmp_path):
    report = tmp_path / "report.json"
    file = models.together(tmp_path / "model.onnx", {name: make for name, (make, _) in DEVICE.items()})
    honoured(partita("place", file, "--provider", f"{target.provider},cpu", "--runs", 2, "--report", report))
    found = by_name(report)
    assert {name: entry["path"] for name, entry in found.items()} == {name: path for name, (_, path) in DEVICE.items()}
    assert [name for name, entry in found.items() if entry["is_slow"]] == ["smooth"]
    for name, entry in found.items():
        assert entry["provider"] == target.ort_name
        assert entry["evidence_kind"] == ("derived" if name == "layout" else "logged"), entry


CUDA: dict[str, tuple[Any, str, str]] = {
    "half": (partial(models.multi_head, kind=models.HALF), "flash (cuDNN)", ""),
    "decode": (partial(models.grouped, kind=models.HALF, tokens=1, past=20), "flash (cuDNN)", ""),
    "prompt": (partial(models.grouped, kind=models.HALF, softcap=30.0), "flash", ""),
    "wide heads": (partial(models.grouped, kind=models.HALF, head_size=512), "memory-efficient", ""),
    "bias of heads": (partial(models.multi_head, kind=models.HALF, extra="bias"), "flash (cuDNN)", ""),
    "single": (models.multi_head, "unfused", "float32"),
    "bias": (partial(models.grouped, kind=models.HALF, extra="bias"), "unfused", "attention_bias"),
    "mask": (partial(models.multi_head, kind=models.HALF, extra="mask"), "unfused", "key_padding_mask"),
    "odd heads": (partial(models.multi_head, kind=models.HALF, head_size=20), "unfused", "multiple of 8"),
}
"""Model -> path on CUDA, and a word of the cause of a slow one."""


@cases("_", only_in("main"))
def test_dry_run_log_names_cuda_attention_kernel(environment, _, partita, tmp_path):
    require_dry_run()
    report = tmp_path / "report.json"
    file = models.together(tmp_path / "model.onnx", {name: make for name, (make, _, _) in CUDA.items()})
    honoured(partita("place", file, "--provider", "cuda,cpu", "--dry-run", "--report", report))
    found = by_name(report)
    assert {name: entry["path"] for name, entry in found.items()} == {name: path for name, (_, path, _) in CUDA.items()}
    for name, entry in found.items():
        word = CUDA[name][2]
        assert entry["evidence_kind"] == "logged" and "SdpaKernel=" in entry["evidence"], entry
        assert entry["is_slow"] is bool(word) and word in entry["cause"], entry
        assert entry["host_us_per_run"] is None


@cases("_", only_in("main"))
def test_slow_nodes_count_in_limit_check_and_views(environment, _, partita, tmp_path):
    report = tmp_path / "report.json"
    slow = models.packed(tmp_path / "slow.onnx", bits=8, level=0)
    done = honoured(partita("place", slow, "--provider", "cpu", "--report", report, "--max-slow-nodes", 1))
    assert "slow: 1 MatMulNBits node: unpacked weights (" in done.out, done
    assert partita("place", slow, "--provider", "cpu", "--max-slow-nodes", 0).code == 3
    failed = partita("report", "check", report, "--max-slow-nodes", 0)
    assert (
        failed.code == 5 and "1 node on a slow kernel path in run: node (MatMulNBits: unpacked weights)" in failed.out
    )
    honoured(partita("report", "check", report, "--max-slow-nodes", 1))
    told = honoured(partita("report", "explain", report, "node"))
    for text in ("unpacked weights (slow)", "evidence kind  logged", "cause", "accuracy_level to 4", "time share"):
        assert text in told.out, told
    shown = honoured(partita("report", "show", report, "--view", "markdown")).out
    assert "Kernel paths" in shown and "unpacked weights" in shown and "accuracy_level to 4" in shown


def by_name(report):
    """Model -> the kernel path of its node."""
    entries = json.loads(report.read_text(encoding="utf-8"))["kernel_paths"]
    return {name: entry for entry in entries for name, _, node in [entry["node"].partition("/")] if "node" in node}
