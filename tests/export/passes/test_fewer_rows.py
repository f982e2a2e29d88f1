"""Symbolic batch: a graph exported for a batch also accepts fewer rows, verified row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.export.passes.fewer_rows import BATCH
from partita.export.pipeline import ExportOptions, export
from partita.package.folder import Manifest, read_manifest
from partita.package.records import SmokeRecord, Verification
from tests.conftest import Exported, TinyCheckpoint

SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"batch_size": 3}),
        pytest.param("llama", {"batch_size": 3, "attention": "onnx24"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "attention": "primitives"}, marks=pytest.mark.heavy),
        ("mixtral", {"batch_size": 2}),
        pytest.param("lfm2", {"batch_size": 2}, marks=pytest.mark.heavy),
        pytest.param("mamba2", {"batch_size": 2}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "precision": "int4"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"batch_size": 2, "cache_precision": "int8"}, marks=pytest.mark.heavy),
    ],
)
def test_batch_packages_are_verified_with_fewer_rows(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    manifest = read_manifest(exported(tiny_checkpoint(kind, **SETTINGS.get(kind, {})), **options))
    assert manifest.graph.symbolic_batch
    tokens = next(port for port in manifest.graph.files[0].inputs if port.role == "tokens")
    assert tokens.shape[0] == BATCH
    assert {state.shape[0] for state in manifest.graph.states} == {options["batch_size"]}
    assert [step.step for step in manifest.verification.steps][-1] == "rows by themselves"


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"batch_size": 2, "static_shapes": True, "prefill_chunk": 6, "attention": "gqa"}, marks=pytest.mark.heavy
        ),
    ],
    ids=["one row", "static shapes"],
)
def test_batch_is_static_for_single_row_or_static_shapes(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, options: dict[str, Any]
) -> None:
    graph = read_manifest(exported(tiny_checkpoint("llama"), **options)).graph
    assert not graph.symbolic_batch
    assert all(port.shape[0] == graph.batch_size for port in graph.files[0].inputs if port.role == "tokens")


def test_failed_check_with_fewer_rows_restores_static_batch(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    tried: list[tuple[str, bool]] = []

    def replay(folder: Path, manifest: Manifest) -> Verification:
        tried.append(("replay", manifest.graph.symbolic_batch))
        agrees = not manifest.graph.symbolic_batch
        return Verification(status="verified" if agrees else "unverified", detail="said by the test")

    def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
        tried.append(("smoke", manifest.graph.symbolic_batch))
        if manifest.graph.symbolic_batch:
            raise ValueError("of another shape")
        return SmokeRecord(chain="cpu", status="ran", detail="said by the test")

    checkpoint = str(tiny_checkpoint("llama", num_hidden_layers=1))
    for verify in (True, False):
        out = tmp_path / str(verify)
        options = ExportOptions(checkpoint, out, max_length=64, batch_size=2, verify=verify)
        summary = export(options, replay=replay, smoke=smoke)
        assert not read_manifest(out).graph.symbolic_batch
        assert any("only for the whole batch" in note for note in summary.notes)
    assert tried == [("replay", True), ("replay", False), ("smoke", True), ("smoke", False)]
