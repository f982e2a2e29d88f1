"""What a provider of another environment has no kernel for is refused by that provider, before anything is written.

An environment of Partita has torch and one ONNX Runtime. Here it is made of two: this one, and the ONNX Runtime of
another in front of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TinyCheckpoint, require
from tests.contract.expectations import ENVIRONMENTS


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
def test_integers_on_both_sides_are_refused_by_operator(
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
