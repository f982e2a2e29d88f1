"""The GitHub action, the pre-commit hook, and the distribution."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from onnx import parser

from tests.conftest import REPOSITORY
from tests.test_examples import VISION

BIN = Path(sys.executable).parent


def act(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the step of action.yml with these inputs, and its defaults for the others."""
    action = yaml.safe_load((REPOSITORY / "action.yml").read_text())
    defaults = {name: entry.get("default", "") for name, entry in action["inputs"].items()}
    step = action["runs"]["steps"][-1]
    known = {**defaults, **{name.replace("_", "-"): value for name, value in inputs.items()}}
    values = {name: known[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()}
    environment = {
        **os.environ,
        **values,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(REPOSITORY),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(["bash", "-c", step["run"]], cwd=folder, env=environment, text=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(VISION), tmp_path / "model.onnx")
    return tmp_path


def test_action_checks_placement_and_writes_summary(folder: Path):
    options = {"model": "model.onnx", "place_options": "--shape 'x=1,3,224,224'"}
    done = act(folder, **options, limits="--require 'provider=cpu,share>=0.95' --max-copies 0")
    assert done.returncode == 0, done.stderr
    assert "CPU" in (folder / "summary.md").read_text()
    (folder / "placement.json").rename(folder / "baseline.json")
    limits = "--require 'provider=cpu,nodes=0'"
    failed = act(folder, **options, limits=limits, baseline="baseline.json")
    assert failed.returncode == 5
    assert "provider=cpu,nodes=0" in failed.stdout
    assert act(folder, **options, baseline="baseline.json").returncode == 0


def test_action_rejects_baseline_equal_to_its_output(folder: Path):
    (folder / "placement.json").write_text("{}")
    refused = act(folder, model="model.onnx", baseline="./placement.json")
    assert refused.returncode == 2 and "another name" in refused.stderr
    assert (folder / "placement.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["place-options", "limits"])
def test_action_names_input_with_unclosed_quote(folder: Path, name: str):
    refused = act(folder, model="model.onnx", **{name: "--shape 'x=1"})
    assert refused.returncode == 2
    assert refused.stderr == f"the input {name} has a quote that is not closed: --shape 'x=1\n"
    assert not (folder / "placement.json").exists()


def test_action_fails_with_placement_error(folder: Path):
    failed = act(folder, model="no-such-model.onnx", limits="--max-copies 0")
    assert failed.returncode not in (0, 5)
    assert "no-such-model.onnx" in failed.stderr


def test_pre_commit_hook_checks_given_reports(folder: Path):
    options = {"model": "model.onnx", "place_options": "--shape x=1,3,224,224"}
    assert act(folder, **options, report="a.report.json").returncode == 0
    (folder / "b.report.json").write_bytes((folder / "a.report.json").read_bytes())
    (hook,) = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
    command = [str(BIN / "python"), "-m", *shlex.split(hook["entry"]), "--require", "provider=cpu,nodes>0"]
    command += ["a.report.json", "b.report.json"]
    settings: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}}
    subprocess.run(command, check=True, **settings)
    failed = subprocess.run([*command, "--require", "provider=cpu,nodes=0"], capture_output=True, text=True, **settings)
    assert failed.returncode == 5
    assert failed.stdout.count("FAILED --require provider=cpu,nodes=0") == 2
    assert failed.stderr.splitlines()[-1] == "partita: 2 of 2 reports failed"


def test_distribution_is_valid_and_complete(tmp_path: Path):
    """Checks metadata, type marker and demo checkpoint; tests and tools are not included."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    files = sorted(tmp_path.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True, capture_output=True
    )
    names = zipfile.ZipFile(files[0]).namelist()
    assert {"partita/py.typed", "partita/demo/checkpoint/config.json"} <= set(names)
    assert not any(name.startswith(("tests/", "tools/")) for name in names)


def test_docs_site_builds_in_strict_mode(tmp_path: Path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    interface = (tmp_path / "reference" / "api.html").read_text()
    assert all(name in interface for name in ("partita.export", "max_new_tokens", "Model.generate"))
    assert "--max-new-tokens" in (tmp_path / "reference" / "cli.html").read_text()
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
