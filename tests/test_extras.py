"""Missing libraries: every verb names the install command and does not report a bug."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import partita
from partita import extras
from partita.errors import CheckpointError
from tests.conftest import REPOSITORY

# For the command and every child it starts: the modules cannot be imported, and pip does not know of them.
HIDE = """
import importlib.metadata, os, sys
hidden = os.environ["HIDDEN"].split(",")
forgotten = os.environ["FORGOTTEN"].split(",")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
known = importlib.metadata.distributions
def distributions(**wanted):
    return (entry for entry in known(**wanted) if extras_normal(entry.metadata["Name"]) not in forgotten)
def extras_normal(name):
    return name.lower().replace("_", "-").replace(".", "-")
importlib.metadata.distributions = distributions
"""
WHEELS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu", "onnxruntime-qnn")
EXPORT = ("torch", "onnxscript", "onnx-ir")
FOR_DEVELOPERS = ("dev", "docs", "test")


def without(
    folder: Path, modules: tuple[str, ...], distributions: tuple[str, ...], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run the command where `modules` cannot be imported and pip does not know `distributions`."""
    (folder / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
        "HIDDEN": ",".join(modules),
        "FORGOTTEN": ",".join(distributions),
    }
    command = [sys.executable, "-m", "partita", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def named(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error that names a command; it is no bug of Partita's."""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert last.startswith("partita: "), done.stderr
    return last


@pytest.mark.parametrize(
    "verb", [["generate", "PACKAGE", "hi"], ["place", "PACKAGE/model.onnx", "--provider", "cpu"]], ids=" ".join
)
def test_missing_onnx_runtime_error_names_runtime_extras(package, tmp_path, verb):
    arguments = [argument.replace("PACKAGE", str(package)) for argument in verb]
    line = named(without(tmp_path, ("onnxruntime",), WHEELS, *arguments))
    assert 'onnxruntime is not installed; pip install "partita[cpu]"' in line
    for extra in ("gpu", "openvino", "webgpu", "qnn", "plugins"):
        assert re.search(rf"\b{extra}\b", line), line
    assert "exactly one of" in line


def test_export_error_names_a_single_command(tiny_checkpoint, tmp_path):
    arguments = ("export", tiny_checkpoint("llama"), tmp_path / "p")
    line = named(without(tmp_path, ("torch", "onnx_ir", "onnxscript"), EXPORT, *arguments))
    assert line.endswith('pip install "partita[export]"')
    both = named(without(tmp_path, ("torch", "onnx_ir", "onnxscript", "onnxruntime"), (*EXPORT, *WHEELS), *arguments))
    assert both.endswith('pip install "partita[export,cpu]"'), "the next try would name the runtime only then"
    assert not (tmp_path / "p").exists()


def declared() -> dict[str, set[str]]:
    """Distributions of pyproject.toml by extra, without those for developers."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    lines = {extras.ALWAYS: project["dependencies"], **project["optional-dependencies"]}
    names = {extra: {str(canonicalize_name(Requirement(line).name)) for line in each} for extra, each in lines.items()}
    return {extra: each for extra, each in names.items() if extra not in FOR_DEVELOPERS}


def test_module_table_matches_pyproject_extras() -> None:
    every = declared()
    table: dict[str, set[str]] = {extra: set() for extra in every}
    for module, extra in {**extras.EXTRAS, **extras.PLUGINS}.items():
        if module != extras.RUNTIME:
            table[extra] |= set(extras.distributions(module))
    runtimes = set(extras.WHEELS[extras.RUNTIME])
    assert table == {extra: wheels - runtimes for extra, wheels in every.items()}
    assert {extra for extra, wheels in every.items() if wheels & runtimes} == {
        extras.EXTRAS[extras.RUNTIME],
        *extras.OTHER_RUNTIMES,
    }
    assert {wheel for wheels in every.values() for wheel in wheels if wheel in runtimes} == runtimes


@pytest.mark.parametrize("module", ["gguf", "pyarrow", "prompt_toolkit", "uvicorn", "ray"])
def test_missing_module_error_names_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_found", lambda name: name == extras.RUNTIME)
    monkeypatch.setattr(metadata, "distributions", lambda **_: iter(()))
    told = extras.explain(ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.part"))
    assert told is not None and str(told).endswith(f'pip install "partita[{extras.EXTRAS[module]}]"')


def test_installed_wheel_with_missing_files_suggests_reinstall(package, tmp_path):
    """Happens after two ONNX Runtime wheels were installed and one removed; pip would skip the extra."""
    line = named(without(tmp_path, ("onnxruntime",), (), "verify", package))
    assert "pip install --force-reinstall --no-deps onnxruntime" in line


def test_undeclared_module_of_foreign_code_is_explained():
    told = extras.explain(ModuleNotFoundError("No module named 'causal_conv1d'", name="causal_conv1d"), foreign=True)
    assert told is not None and "causal_conv1d" in str(told)
    assert extras.explain(ModuleNotFoundError("No module named 'causal_conv1d'", name="causal_conv1d")) is None


def test_installed_versions_are_within_declared_bounds():
    assert extras.unsupported_versions() == ""


def test_failed_export_error_begins_with_unsupported_versions(tmp_path, monkeypatch):
    installed = metadata.version("transformers")
    monkeypatch.setattr(extras, "_requirements", lambda: ["transformers>=4,<5; extra == 'export'", "numpy>=1"])
    (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(CheckpointError) as caught:
        partita.export(tmp_path, tmp_path / "out")
    assert str(caught.value).startswith(
        f'transformers {installed} is outside the supported range: pip install "transformers<5,>=4"; '
    )
