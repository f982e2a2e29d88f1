"""The pytest plugin for contract tests of other environments: missing, crashing and failing ones are reported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TEST = "tests/contract/test_place.py"
PICK = "between_supported and webgpu"
"""One test that needs no package and no device."""


def session(*arguments: object, required: bool = False) -> tuple[int, str]:
    """Exit code and output of a pytest of the main environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
            "PARTITA_REQUIRE_ALL": "1" if required else "0",
            "PYTEST_PLUGINS": "tests.environments",  # for a test file outside tests/
        },
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def venvs(tmp_path: Path):
    """Make a folder of environments in which webgpu has a Python that is this shell script."""

    def make(script: str) -> Path:
        python = tmp_path / "venvs" / "webgpu" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        (python.parent.parent / ".installed").touch()
        return tmp_path / "venvs"

    return make


def test_missing_environment_is_skipped_or_fails_if_required(tmp_path):
    code, out = session(TEST, "-k", PICK, "--environments", "webgpu", "--venvs", tmp_path)
    assert code == 0 and "1 skipped" in out, out
    assert "environment webgpu is not installed; run: make env-webgpu" in out
    assert "webgpu" in out.partition("environments ==")[2]
    (tmp_path / "webgpu.failed").write_text("ERROR: No matching distribution found\n")
    code, out = session(TEST, "-k", PICK, "--environments", "webgpu", "--venvs", tmp_path, required=True)
    assert code == 1 and "1 failed" in out and "(ERROR: No matching distribution found)" in out, out


def test_crashed_child_process_fails_its_tests_and_shows_output(venvs):
    folder = venvs("echo last words; exit 7")
    code, out = session(TEST, "-k", PICK, "--environments", "webgpu", "--venvs", folder)
    assert code == 1 and "1 failed" in out, out
    assert "ended with exit code 7 before this test did" in out and "last words" in out


THREE = """
import pytest
pytestmark = pytest.mark.environment("webgpu")
def test_passes(): pass
def test_fails(request): assert request.config.getoption("--inside") == "elsewhere"
def test_skips(): pytest.skip("because it says so")
"""


def test_child_process_outcomes_are_reported_in_session(venvs):
    folder = venvs(f'exec {sys.executable} "$@"')
    build = REPOSITORY / "build"  # a test outside the repository would have no node id
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as inside:
        file = Path(inside) / "test_three.py"
        file.write_text(THREE)
        code, out = session(file, "--environments", "webgpu", "--venvs", folder)
    assert code == 1 and "1 failed, 1 passed, 1 skipped" in out, out
    assert "assert 'webgpu' == 'elsewhere'" in out, "the failure text comes along"
    assert "because it says so" in out
