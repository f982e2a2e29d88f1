"""Shared traces of tests (tests/traces.py): exports of a model write the same files with and without sharing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.conftest import TinyCheckpoint


def written(checkpoint: Path, out: Path) -> bytes:
    """The graph of an export."""
    from partita.export.pipeline import ExportOptions, export
    from partita.library.exporting import replay, scorer

    export(ExportOptions(str(checkpoint), out, max_length=32), replay=replay, scorer=scorer)
    return (out / "model.onnx").read_bytes()


@pytest.mark.heavy
def test_shared_trace_writes_same_files_as_separate_traces(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = tiny_checkpoint("qwen3", num_hidden_layers=1)
    from partita.export import drafts  # noqa: F401 - then it can be shared

    traces.share(request.node)
    shared = sys.modules["partita.export.drafts"].trace
    assert isinstance(shared, traces.Traces)
    first = written(checkpoint, tmp_path / "first")
    taken = shared.taken
    second = written(checkpoint, tmp_path / "second")
    assert shared.taken > taken
    shared.on = False
    assert written(checkpoint, tmp_path / "alone") == second == first


def test_trace_key_depends_on_config_and_not_on_weights(tiny_checkpoint: TinyCheckpoint) -> None:
    from transformers import AutoConfig

    from partita.export.trace.fake_model import build_fake_model

    def decides(checkpoint: Path) -> tuple[object, ...]:
        config = AutoConfig.from_pretrained(checkpoint)
        return traces.what_decides(build_fake_model(config, "float32", 1, 32))

    small: dict[str, Any] = {"num_hidden_layers": 1}
    known = decides(tiny_checkpoint("llama", **small))
    assert decides(tiny_checkpoint("llama", seed=1, **small)) == known
    for other in ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, {"rms_norm_eps": 0.01}):
        assert decides(tiny_checkpoint("llama", **other, **small)) != known


def test_patched_export_code_is_detected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", Path.rename)
    assert not traces.replaces_export_code(request.node)
    monkeypatch.setattr("partita.export.drafts.lowering", None)
    assert traces.replaces_export_code(request.node)
