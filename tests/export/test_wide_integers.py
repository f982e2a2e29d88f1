"""No integers of 64 bits are computed in a step: what is fed is, tokens and which logits are wanted, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from partita.export.passes.fewer_rows import BATCH
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint
from tests.export.integers import wide_integers


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"precision": "int4", "attention": "gqa"}),
        ("llama", {"batch_size": 3}),
        pytest.param("llama", {"attention": "gqa"}, marks=pytest.mark.heavy),
        pytest.param(
            "llama", {"precision": "fp16", "activations": "fp32", "attention": "gqa"}, marks=pytest.mark.heavy
        ),
        ("llama", {"batch_size": 3, "attention": "onnx24"}),
        ("qwen2", {"precision": "int8", "activations": "int8"}),
        pytest.param("llama", {"precision": "fp16"}, marks=pytest.mark.heavy),
        pytest.param("llama", {"precision": "bf16", "attention": "gqa"}, marks=pytest.mark.heavy),
        pytest.param("qwen3", {"precision": "int4"}, marks=pytest.mark.heavy),
        pytest.param(
            "llama", {"precision": "int8", "activations": "int8", "static_shapes": True}, marks=pytest.mark.heavy
        ),
    ],
)
def test_a_step_computes_no_wide_integers(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, kind: str, options: dict[str, Any]
) -> None:
    package = exported(tiny_checkpoint(kind), **options)
    for file in read_manifest(package).graph.files:
        assert wide_integers(package / file.file) == {}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"Shape", "Concat"}),  # Gemm takes matrices: what comes out of it is told the number of rows again
        ({"precision": "int4"}, set()),
        ({"precision": "int8", "activations": "int8"}, set()),
    ],
)
def test_a_head_that_is_the_embedding_in_a_batch(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, options: dict[str, Any], expected: set[str]
) -> None:
    package = exported(tiny_checkpoint("llama", tied=True), batch_size=2, **options)
    found = wide_integers(package / "model.onnx")
    assert set(found.values()) == expected and all(name.startswith(BATCH) for name in found)
