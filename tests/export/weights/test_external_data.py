"""Weights reach the package bit-exact from every file format; shared weights are written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.torch import load_file

from partita.errors import ResourceError
from partita.export.weights import external_data as weights
from partita.package.folder import WEIGHTS
from tests.conftest import TinyCheckpoint
from tests.export.test_graph import unverified


def array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def test_weights_are_bit_exact_and_large_ones_page_aligned(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    original = load_file(tiny_checkpoint("llama") / "model.safetensors")
    unverified(tiny_checkpoint("llama", shards=3), tmp_path / "out")
    model = ir.load(tmp_path / "out" / "model.onnx")
    np.testing.assert_array_equal(array(model, "model.norm.weight"), original["model.norm.weight"].numpy())
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(array(model, f"{name}.transposed"), original[name].T.numpy())
    held = (value.const_value for value in model.graph.initializers.values())
    large = [t for t in held if isinstance(t, ir.ExternalTensor) and t.nbytes >= weights.ALIGNMENT]
    assert large and all(t.offset is not None and t.offset % weights.ALIGNMENT == 0 for t in large)


def test_tied_weights_are_stored_once(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    tied, untied = tiny_checkpoint("llama", tied=True), tiny_checkpoint("llama", tied=False)
    unverified(tied, tmp_path / "tied")
    unverified(untied, tmp_path / "untied")
    embedding = 288 * 64 * 4
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("untied", "tied")]
    assert abs(sizes[0] - sizes[1] - embedding) <= weights.ALIGNMENT


def test_insufficient_disk_space_is_detected_before_writing(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ResourceError, match="no space left: the package needs"):
        unverified(tiny_checkpoint("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_bytecode")
def test_full_disk_while_writing_raises_resource_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk."""
    import resource
    import signal

    old_limit, old_handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old_limit[1]))
    try:
        with pytest.raises(ResourceError, match="no space left while writing"):
            unverified(tiny_checkpoint("llama"), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert not list(tmp_path.iterdir())
