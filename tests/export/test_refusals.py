"""Models that cannot be exported yet are refused with the reason, never exported wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from partita.errors import UnsupportedModelError
from partita.export.hooks import MaskRule, classify_mask
from partita.export.pipeline import ExportOptions, export
from partita.package import Manifest, Verification
from tests.conftest import TinyCheckpoint

REFUSED = {
    "mamba": "cache",
    "jamba": "mixture-of-experts layers (JambaExperts)",
    "falcon_mamba": "cache",
    "mixtral": "mixture-of-experts layers (MixtralExperts)",
    "xglm": "computes with its attention mask",
    "mpt": "computes with its attention mask",
    "gptj": "AttentionInterface",
    "llama4_text": "neither causal nor a sliding window",
}


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_with_the_reason(tiny_checkpoint: TinyCheckpoint, tmp_path: Path, model_type: str) -> None:
    extra: dict[str, dict[str, Any]] = {
        "llama4_text": {"attention_chunk_size": 8, "moe_layers": [], "head_dim": 16, "intermediate_size_mlp": 96}
    }
    folder = tiny_checkpoint(model_type, tokenizer=False, **extra.get(model_type, {}))
    with pytest.raises(UnsupportedModelError) as caught:
        export(ExportOptions(str(folder), tmp_path / "out", max_length=64), replay=_never)
    assert REFUSED[model_type] in str(caught.value), str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_length_is_refused_by_name(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, kind: str
) -> None:
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    folder = tiny_checkpoint("llama", tokenizer=False, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=f"rope type '{kind}' picks its frequencies"):
        export(ExportOptions(str(folder), tmp_path / "out", max_length=64), replay=_never)


def _never(folder: Path, manifest: Manifest) -> Verification:
    raise AssertionError("a refused model must not get as far as a replay")


def causal(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_a_causal_mask_has_no_window() -> None:
    assert classify_mask(causal, 64) == MaskRule(None)


@pytest.mark.parametrize("window", [1, 2, 8, 63])
def test_a_sliding_mask_has_its_window(window: int) -> None:
    rule = classify_mask(lambda b, h, q, k: (k <= q) & (k > q - window), 64)
    assert rule == MaskRule(window)


def test_a_window_as_long_as_the_cache_is_no_window() -> None:
    assert classify_mask(lambda b, h, q, k: (k <= q) & (k > q - 64), 64) == MaskRule(None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),  # chunks
        lambda b, h, q, k: k <= q + 1,  # sees the future
        lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool),  # bidirectional
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)),  # window with sinks
    ],
)
def test_other_masks_are_refused(mask: object) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        classify_mask(mask, 64)  # type: ignore[arg-type]
