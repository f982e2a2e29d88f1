"""The reference logits equal transformers' defaults, on prompts crossing windows and original contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.commands.export import describe
from partita.errors import ParityError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.pipeline import ExportOptions, export
from partita.export.trace import state
from partita.export.trace.hooks import MaskRule
from partita.export.verify import known_answer
from partita.library.exporting import replay
from partita.providers.resolve import parse_chain
from partita.runtime.verify import replay as verify
from tests.checkpoints import save_random_model
from tests.conftest import TinyCheckpoint
from tests.export.breadth import recipes

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0, 1.1] * 4,
        "long_factor": [1.5, 4.0] * 4,
    },
    "original_max_position_embeddings": 40,
    "max_position_embeddings": 160,
    "sliding_window": None,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 40}


def checkpoint(folder: Path, model_type: str, **settings: Any) -> Path:
    """A tiny checkpoint of the breadth recipe with other settings."""
    save_random_model(folder, model_type, {**recipes.settings(model_type), **settings}, "float32", 0)
    return folder


@pytest.mark.parametrize(
    ("model_type", "settings", "crossed", "length", "missed"),
    [
        ("llama", {}, 1024, 24, ()),
        ("mistral", {"sliding_window": 40}, 1024, 48, ()),
        ("mistral", {"sliding_window": 40}, 39, 24, ("sliding window of 40 tokens",)),
        ("mistral", {"sliding_window": 99}, 1024, 93, ()),  # the cache has 101 tokens, of which 100 are fed
        ("mistral", {"sliding_window": 100}, 1024, 24, ()),
        ("llama4_text", {"attention_chunk_size": 40}, 1024, 48, ()),
        ("llama4_text", {"attention_chunk_size": 40}, 8, 24, ("attention chunk of 40 tokens",)),
        ("gpt_neo", {"window_size": 40}, 1024, 48, ()),  # which key a query sees is a buffer
        ("phi3", LONGROPE, 1024, 40, ()),
        ("phi3", LONGROPE, 39, 24, ("rotary frequencies beyond 40 tokens",)),
        ("phi3", {**LONGROPE, "sliding_window": 60}, 1024, 68, ("rotary frequencies up to 40 tokens",)),
        ("llama", DYNAMIC, 1024, 40, ()),
    ],
)
def test_reference_prompt_crosses_windows_chunks_and_contexts(
    tmp_path: Path, model_type: str, settings: dict[str, Any], crossed: int, length: int, missed: tuple[str, ...]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = checkpoint(tmp_path, model_type, **settings)
    answer = known_answer.compute(open_checkpoint(str(folder)), 288, 101, crossed=crossed)
    assert len(answer.prompt) == length and len(answer.tokens) == 8 and answer.not_exercised == missed
    assert answer.prefill_logits.shape == (24, 288) and answer.decode_logits.shape == (8, 288)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # with its default attention
    texts = answer.prompt, np.concatenate([answer.prompt, answer.tokens])
    with torch.no_grad():
        prompt, whole = (model(input_ids=torch.from_numpy(text)[None]).logits[0].numpy() for text in texts)
    if not answer.own_frequencies:
        prompt = whole[:-8]
    scale = np.abs(whole).max()
    assert np.abs(answer.prefill_logits - prompt[-24:]).max() < 1e-5 * scale
    assert np.abs(answer.decode_logits - whole[-8:]).max() < 1e-5 * scale


@pytest.mark.parametrize(
    ("model_type", "settings", "options"),
    [
        ("mistral", {"sliding_window": 40}, {"cache": "window", "batch_size": 3}),
        pytest.param("phi3", LONGROPE, {"static_shapes": True}, marks=pytest.mark.heavy),
        pytest.param("mistral", {"sliding_window": 40}, {"cache": "growing"}, marks=pytest.mark.heavy),
        pytest.param("mistral", {"sliding_window": 40}, {"attention": "onnx24"}, marks=pytest.mark.heavy),
        pytest.param("llama4_text", {"attention_chunk_size": 40}, {"batch_size": 3}, marks=pytest.mark.heavy),
        pytest.param("llama", DYNAMIC, {"batch_size": 2}, marks=pytest.mark.heavy),
    ],
)
def test_package_is_verified_beyond_windows_and_contexts(
    tmp_path: Path, model_type: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    folder = checkpoint(tmp_path / "checkpoint", model_type, **settings)
    out = tmp_path / "out"
    found = export(ExportOptions(str(folder), out, max_length=101, **options), replay=replay).manifest.verification
    assert found.headline == "verified" and not found.not_exercised
    assert found.steps and all(step.max_rel_error < 1e-4 for step in found.steps)
    assert (out / "known_answer.safetensors").stat().st_size < 40 * 288 * 4


def test_window_off_by_1_raises_parity_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "classify_mask", lambda *_: MaskRule(41))
    folder = tiny_checkpoint("mistral", sliding_window=40, num_hidden_layers=1)
    with pytest.raises(ParityError, match="does not match the source model: first difference in prefill"):
        export(ExportOptions(str(folder), tmp_path / "out", max_length=64), replay=replay)


def test_headline_lists_unexercised_features(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    folder, out = tiny_checkpoint("mistral", sliding_window=40, num_hidden_layers=1), tmp_path / "out"
    summary = export(ExportOptions(str(folder), out, max_length=64, verify_length=39), replay=replay)
    told = "verified (not exercised: sliding window of 40 tokens)"
    assert describe(summary)[0].endswith(f"exported, {told}")
    assert summary.manifest.verification.headline == told
    assert (summary.manifest.options or {})["verify-length"] == ("39",)
    assert verify.replay(out, parse_chain("cpu"), threads=1).headline == told


def test_verify_length_without_verification_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="verify_length"):
        export(ExportOptions("any", tmp_path / "out", verify=False, verify_length=2048), replay=replay)


@pytest.mark.parametrize("refused", ["_prefill", "_continue"])
def test_reference_logits_are_equal_without_usable_cache(
    refused: str, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama")))
    wanted = known_answer.compute(checkpoint, 288, 64)

    def fails(*_: object) -> None:
        raise RuntimeError("no cache")

    monkeypatch.setattr(known_answer, refused, fails)
    found = known_answer.compute(checkpoint, 288, 64)
    for name in ("prompt", "prefill_logits", "tokens", "decode_logits"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
