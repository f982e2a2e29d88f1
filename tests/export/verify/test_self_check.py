"""Inconsistent models are rejected with a message; models that need a mask of ones or lack experts export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from partita.errors import ParityError, UnsupportedModelError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, export
from partita.export.verify import self_check
from partita.export.verify.known_answer import compute
from partita.library.exporting import replay
from partita.package.folder import Manifest
from partita.package.records import Verification
from tests.conftest import TinyCheckpoint


def options(folder: Path, out: Path) -> ExportOptions:
    return ExportOptions(str(folder), out, max_length=64)


@pytest.mark.heavy
def test_model_with_generate_differing_from_forward_is_rejected(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """roberta counts positions from its padding token in one and from zero in the other."""
    folder = tiny_checkpoint("roberta", num_hidden_layers=1, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="is inconsistent: generate") as caught:
        export(options(folder, tmp_path / "out"), replay=replay)
    assert "report this model" not in str(caught.value) and not (tmp_path / "out").exists()


def test_parity_error_of_consistent_model_requests_report(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def wrong(folder: Path, manifest: Manifest) -> Verification:
        return Verification(status="unverified", detail="first difference in prefill")

    with pytest.raises(ParityError, match="please report this model"):
        export(options(tiny_checkpoint("llama", num_hidden_layers=1), tmp_path / "out"), replay=wrong)


def test_non_finite_logits_of_source_model_are_reported(
    tiny_checkpoint: TinyCheckpoint, own_copy: Callable[[Path], Path]
) -> None:
    from safetensors.torch import load_file, save_file

    sound = tiny_checkpoint("llama", num_hidden_layers=1)
    answer, broken = compute(open_checkpoint(str(sound)), 288, 64), own_copy(sound)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    told = self_check.disagreement(open_checkpoint(str(broken)), answer)
    assert told is not None and told.startswith("LlamaForCausalLM computes logits that are not finite")


def test_falcon_with_alibi_is_verified(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        "falcon",
        num_hidden_layers=1,
        alibi=True,
        hidden_size=80,
        num_attention_heads=5,
        multi_query=False,
        new_decoder_architecture=False,
    )
    summary = export(options(folder, tmp_path / "out"), replay=replay)
    assert summary.manifest.verification.status == "verified"
