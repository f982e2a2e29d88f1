"""Shared traces of tests (tests/traces.py): what a trace depends on, and tests that share none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.conftest import TinyCheckpoint


def test_trace_key_depends_on_config_and_not_on_weights(tiny_checkpoint: TinyCheckpoint) -> None:
    from transformers import AutoConfig

    from partita.export.trace.fake_model import build_fake_model

    small: dict[str, Any] = {"num_hidden_layers": 1}
    checkpoints = [
        tiny_checkpoint("llama", **small, **changed) for changed in ({}, {"seed": 1}, {"rms_norm_eps": 0.01})
    ]
    configs = map(AutoConfig.from_pretrained, checkpoints)
    first, *others = (traces.what_decides(build_fake_model(config, "float32", 1, 32)) for config in configs)
    assert [other == first for other in others] == [True, False]


def test_patched_export_code_is_detected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", Path.rename)
    assert not traces.replaces_export_code(request.node)
    monkeypatch.setattr("partita.export.drafts.lowering", None)
    assert traces.replaces_export_code(request.node)
