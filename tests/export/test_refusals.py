"""Unsupported models are rejected with the reason and write nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita.errors import UnsupportedModelError
from partita.export.pipeline import ExportOptions, export
from partita.export.trace import hooks
from partita.export.trace.hooks import MaskFunction, MaskRule, classify_mask
from partita.package.folder import Manifest
from partita.package.records import Verification
from tests.conftest import REPOSITORY, TinyCheckpoint, require
from tests.contract.expectations import ENVIRONMENTS
from tests.export.breadth import recipes

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


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.heavy if name in LONG else ()) for name in sorted(REFUSED)]
)
def test_unsupported_model_is_rejected_with_reason(tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    recipes.save(folder, model_type)
    with pytest.raises(UnsupportedModelError) as caught:
        export(ExportOptions(str(folder), tmp_path / "out", max_length=64), replay=_never)
    assert REFUSED[model_type] in str(caught.value), str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.heavy
def test_llama4_text_requires_batch_size_1(tmp_path: Path) -> None:
    """llama4 scales its queries by the cache length, one number for all rows."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    recipes.save(folder, "llama4_text")
    with pytest.raises(UnsupportedModelError, match="one for the whole batch; export it with `batch_size=1`"):
        export(ExportOptions(str(folder), tmp_path / "out", max_length=64, batch_size=2), replay=_never)


def _never(folder: Path, manifest: Manifest) -> Verification:
    raise AssertionError("a refused model must not get as far as a replay")


def causal(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_causal_mask_has_no_window() -> None:
    assert classify_mask(causal, 64) == MaskRule(None)


@pytest.mark.parametrize("window", [1, 2, 8, 63])
def test_sliding_mask_window_is_detected(window: int) -> None:
    rule = classify_mask(lambda b, h, q, k: (k <= q) & (k > q - window), 64)
    assert rule == MaskRule(window)


def test_window_as_long_as_cache_is_ignored() -> None:
    """Valid only for sequences that fit the cache (any_length=False); a growing cache may exceed it."""
    assert classify_mask(lambda b, h, q, k: (k <= q) & (k > q - 64), 64) == MaskRule(None, any_length=False)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),  # chunks
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)),  # a window, and the first keys
    ],
)
def test_irregular_causal_mask_has_no_rule(mask: MaskFunction) -> None:
    assert classify_mask(mask, 64) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool),
    ],
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


# What a provider of another environment has no kernel for is refused by that provider, before anything is written


def in_front(folder: Path, venv: Path) -> Path:
    """A folder with nothing but the ONNX Runtime of an environment."""
    found = list(venv.glob("lib/python*/site-packages/onnxruntime*"))
    require(f"the environment {venv.name}", bool(found))
    folder.mkdir()
    for entry in found:
        (folder / entry.name).symlink_to(entry.resolve())
    return folder


@pytest.mark.parametrize(
    ("name", "target"),
    [("webgpu", "webgpu"), pytest.param("qnn", "qnn", marks=pytest.mark.heavy)],
)
@pytest.mark.heavy
def test_int8_weights_with_int8_activations_are_rejected_by_operator(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, pytestconfig: pytest.Config, name: str, target: str
) -> None:
    runtime = in_front(tmp_path / "runtime", REPOSITORY / pytestconfig.getoption("--venvs") / name)
    paths = os.pathsep.join(map(str, (runtime, REPOSITORY)))
    words = ["export", tiny_checkpoint("llama"), tmp_path / "out" / "package", "--target", target]
    words += ["--precision", "int8", "--activations", "int8"]
    done = subprocess.run(
        [sys.executable, "-m", "partita", *map(str, words)],
        env={**ENVIRONMENTS[name].variables, **os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 3, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("partita: ")]
    assert line.startswith(f"partita: --activations int8: {target} has no kernel that computes float32 activations")
    assert "MatMulInteger over quantised activations: leaves MatMulInteger" in line and "nothing was written" in line
    assert not (tmp_path / "out").exists()
