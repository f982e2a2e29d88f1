"""Checkpoints with tied embeddings that also store the head: the export matches transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from partita.export.pipeline import ExportOptions, export
from partita.export.publish import ExportResult
from partita.library.exporting import replay
from tests.checkpoints import edit_tensors
from tests.conftest import TinyCheckpoint
from tests.export.quantise.test_precision import checked, export_to


def with_head(folder: Path, copy: Path, change: str, **more: Any) -> Path:
    """The checkpoint with a stored head beside its tied embedding."""
    import torch

    def add(weights: dict[str, Any]) -> None:
        table = weights["model.embed_tokens.weight"]
        head = {"rounded": table.to(torch.bfloat16), "other": table.flip(0), "same": table.clone()}[change]
        weights |= {"lm_head.weight": head, **more}

    return edit_tensors(Path(shutil.copytree(folder, copy)), add)


def exported(folder: Path, out: Path, **options: Any) -> ExportResult:
    return export(ExportOptions(str(folder), out, max_length=64, **options), replay=replay)


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    """A checkpoint whose head is its embedding."""
    return tiny_checkpoint("llama", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parameters(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of that checkpoint."""
    tied = tiny_checkpoint("llama", num_hidden_layers=1, tie_word_embeddings=True)
    return exported(tied, tmp_path_factory.mktemp("tied-") / "out", verify=False).manifest.source.parameters


@pytest.mark.parametrize(("change", "precision"), [("other", "bf16"), ("rounded", "fp32")])
def test_differing_stored_head_is_exported_as_separate_weight(
    folder: Path, parameters: int, tmp_path: Path, change: str, precision: str
) -> None:
    summary = exported(with_head(folder, tmp_path / "c", change), tmp_path / "out", precision=precision)
    manifest = summary.manifest
    assert manifest.verification.status == "verified" and manifest.source.unused == ()
    assert any("lm_head.weight differs from" in note for note in summary.notes)
    assert manifest.source.parameters > parameters, "the head is a weight of its own"


def test_identical_stored_head_stays_tied(folder: Path, parameters: int, tmp_path: Path) -> None:
    summary = exported(with_head(folder, tmp_path / "c", "same"), tmp_path / "out", verify=False)
    assert summary.manifest.source.parameters == parameters
    assert not [note for note in summary.notes if "lm_head" in note]


def test_identical_stored_head_stays_fp32_with_int4_embedding(folder: Path, tmp_path: Path) -> None:
    """transformers ties both; the package has a quantised embedding and a float head."""
    copy = with_head(folder, tmp_path / "c", "same")
    export_to(tmp_path / "out", copy, precision="int4", keep={"lm_head": "fp32"})
    manifest = checked(tmp_path / "out")
    assert manifest.packed is not None and manifest.packed.keep == ("lm_head=fp32",)


def test_unused_tensors_are_reported_by_module_except_legacy_buffers(folder: Path, tmp_path: Path) -> None:
    import torch

    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.position_ids": torch.arange(4),
        **{f"vision_tower.blocks.{index}.weight": torch.ones(100, 100) for index in range(3)},
        "model.layers.7.mlp.weight": torch.ones(2),
        "model.norm.extra": torch.ones(2),
    }
    summary = exported(with_head(folder, tmp_path / "c", "same", **more), tmp_path / "out", verify=False)
    found = ("vision_tower (3 tensors, 117 KiB)", "model.layers.7 (1 tensor, 8 B)", "model.norm.extra")
    assert summary.manifest.source.unused == found
    assert any(f"omitted, because the logits do not depend on it: {', '.join(found)}" in note for note in summary.notes)
