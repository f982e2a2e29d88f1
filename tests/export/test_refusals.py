"""Unsupported models are rejected with the reason and write nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.errors import UnsupportedModelError
from partita.export.trace import hooks
from partita.export.trace.hooks import MaskFunction, MaskRule, classify_mask
from tests.export.breadth import recipes
from tests.export.test_bad_checkpoints import refuse

REFUSED = {
    "dbrx": "loops over the selected experts",
    "deepseek_v32": "sparse attention indexer",
    "deepseek_v4": "accesses the layers of transformers' cache directly",
    "minimax": "uses cache of its own",
    "recurrent_gemma": "temporal_block.conv1d_state between steps outside transformers' cache",
    "rwkv": "has no cache argument",
    "openai-gpt": "has no cache argument",
    "zamba": "scans the heads of a selective state space separately",
}


LONG = ("recurrent_gemma", "zamba")
TYPES = [pytest.param(name, marks=pytest.mark.heavy if name in LONG else ()) for name in sorted(REFUSED)]


@pytest.mark.parametrize("model_type", TYPES)
def test_unsupported_model_is_rejected_with_reason(tmp_path: Path, model_type: str) -> None:
    folder = recipes.save(tmp_path / "checkpoint", model_type)
    error = refuse(folder, tmp_path / "out", max_length=64)
    assert isinstance(error, UnsupportedModelError) and REFUSED[model_type] in str(error), str(error)


@pytest.mark.heavy
def test_llama4_text_requires_batch_size_1(tmp_path: Path) -> None:
    """llama4 scales its queries by the cache length, one number for all rows."""
    folder = recipes.save(tmp_path / "checkpoint", "llama4_text")
    error = refuse(folder, tmp_path / "out", max_length=64, batch_size=2)
    assert "one for the whole batch; export it with `batch_size=1`" in str(error)


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (lambda b, h, q, k: k <= q, MaskRule(None)),
        *((lambda b, h, q, k, n=n: (k <= q) & (k > q - n), MaskRule(n)) for n in (1, 2, 8, 63)),
        # as long as the cache: holds only for sequences that fit it; a growing cache may exceed it
        (lambda b, h, q, k: (k <= q) & (k > q - 64), MaskRule(None, any_length=False)),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), None),  # chunks
        (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)), None),  # a window, and the first keys
    ],
)
def test_window_of_causal_mask_is_detected(mask: MaskFunction, rule: MaskRule | None) -> None:
    assert classify_mask(mask, 64) == rule


@pytest.mark.parametrize(
    "mask", [lambda b, h, q, k: k <= q + 1, lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool)]
)
def test_non_causal_mask_is_rejected(mask: MaskFunction) -> None:
    with pytest.raises(UnsupportedModelError, match="a token attends to later ones"):
        classify_mask(mask, 64)


def test_modified_tensor_of_ones_is_not_tracked_as_ones() -> None:
    ones = hooks._Ones()
    with ones:
        plain, marked = torch.ones(1, 4), torch.ones(1, 4)
        wide = plain.to(torch.float64)
        marked[0, 1] = 0
    assert ones.knows(plain) and ones.knows(wide)
    assert not ones.knows(marked) and not ones.knows(torch.ones(1, 4))
