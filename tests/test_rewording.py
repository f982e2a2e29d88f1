"""What Partita decides does not hang on how it says things: reworded, it ends and reports in the same way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, TinyCheckpoint
from tests.reworded import Reword, reworded

pytestmark = pytest.mark.heavy  # tests/test_sentences.py looks at the text of the code in every run


def told(checkpoint: Path, *words: str) -> dict[str, Any]:
    """What the program with these words decides and says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.reworded", str(checkpoint), *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def both(tiny_checkpoint: TinyCheckpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    checkpoint = tiny_checkpoint("llama")
    return told(checkpoint), told(checkpoint, "reworded")


def test_it_was_reworded(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, other = both
    assert plain["changed"] == 0 and other["changed"] > 1000
    assert plain["said"] != other["said"] and "no such file" in plain["said"].lower()


def test_every_command_ends_as_before(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, other = both
    assert len({code for _, code in plain["ended"]}) >= 4, "several ways to end"
    assert other["ended"] == plain["ended"]


def test_every_field_that_is_no_sentence_is_as_before(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, other = both
    for name, value in plain["decided"].items():
        assert other["decided"][name] == value, name


def test_work_that_succeeds_comes_out_as_before(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Also that of child processes, in which the experiments are made."""
    plain, other = both
    worked = plain["worked"]
    assert [worked[name] for name in ("verified", "generated", "exported", "verified again", "placed")] == [0] * 5
    assert any(trials for _, _, _, trials in worked["placed fallbacks"]), "experiments were made"
    for name, value in worked.items():
        assert other["worked"][name] == value, name


def test_the_hook_rewords_prose_and_nothing_else() -> None:
    import ast

    source = """
def f(x):
    "what it does"
    y: Literal["in the house"] = re.compile("what others say")
    return f"no {x} found here, see --provider cuda", "model.onnx", "<b>no such thing</b>", "not run: "
"""
    tree = Reword("partita.x")
    written = ast.unparse(tree.visit(ast.parse(source)))
    for kept in ("what it does", "in the house", "what others say", "model.onnx", "<b>no such thing</b>", "--provider"):
        assert kept in written
    assert "found here" not in written and "not run" not in written and tree.changed >= 2


def test_rewording_depends_on_the_place() -> None:
    """So that a sentence which is written in one place and looked for in another is not found."""
    assert reworded("left to another", 1) != reworded("left to another", 2)
