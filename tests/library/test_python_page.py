"""The examples of docs/python.md and the README run in one process and print the documented output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from tests.conftest import DEMO_CHECKPOINT, REPOSITORY, TinyCheckpoint
from tests.test_examples import VISION

PAGE = REPOSITORY / "docs" / "python.md"
README = REPOSITORY / "README.md"


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


BLOCKS = blocks_of(PAGE)
PRINTS = re.compile(r"# prints (.*)$", re.MULTILINE)


@pytest.mark.parametrize("checkpoint", ["llama", pytest.param("demo", marks=pytest.mark.heavy)])
def test_documentation_examples_print_documented_output(
    checkpoint: str,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = DEMO_CHECKPOINT if checkpoint == "demo" else tiny_checkpoint(checkpoint)
    shutil.copytree(theirs, tmp_path / "my-checkpoint")
    onnx.save(parser.parse_model(VISION), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, *others = BLOCKS  # exports the package that all others load
    for block in (first, *blocks_of(README), *others):
        exec(compile(block, str(PAGE), "exec"), names)
        printed = capsys.readouterr()
        assert all(text in printed.out for text in PRINTS.findall(block)), printed.out
        assert printed.err == ""
    assert "<html" in (tmp_path / "run.html").read_text("utf-8").lower()
