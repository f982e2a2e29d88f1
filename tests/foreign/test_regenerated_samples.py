"""Folders that optimum and onnxruntime-genai make now, of every type of the table, where their environments are.

`PARTITA_OPTIMUM_PYTHON` and `PARTITA_GENAI_PYTHON` name the interpreters (CONTRIBUTING.md); the samples that are
checked in show the same of one type.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import require
from tests.foreign.make_samples import with_genai, with_optimum
from tests.foreign.makers.with_optimum import TYPES
from tests.foreign.test_generate import generated


def interpreter(name: str) -> str:
    """The interpreter that a variable names."""
    found = os.environ.get(name, "")
    require(f"{name}, the Python of the other exporter", Path(found).is_file())
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", list(TYPES))
def test_optimum_export_tokens_match_transformers(model_type: str, tmp_path: Path) -> None:
    with_optimum(interpreter("PARTITA_OPTIMUM_PYTHON"), tmp_path, model_type)
    known = json.loads((tmp_path / model_type / "tokens.json").read_text(encoding="utf-8"))
    for layout in ("optimum", "whole", "pair", "merged"):
        folder = tmp_path / model_type / layout
        if folder.is_dir():
            assert generated(folder) == known["tokens"], layout
            assert generated(folder, chunk=3) == known["tokens"], layout


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("wanted", ["fp32:cpu", "int4:cpu"])
def test_genai_model_tokens_match_onnxruntime_genai(model_type: str, wanted: str, tmp_path: Path) -> None:
    with_optimum(interpreter("PARTITA_OPTIMUM_PYTHON"), tmp_path, model_type)
    home = tmp_path / model_type
    with_genai(interpreter("PARTITA_GENAI_PYTHON"), home, wanted)
    folder = home / f"genai-{wanted.replace(':', '-')}"
    known = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    assert generated(folder) == known["tokens"]
