"""Fixtures of the contract tests: the command line, plain ONNX Runtime, and small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.contract import models
from tests.contract.commands import Done, Partita, device_is_there, execute, generated, honoured, wrong_processor
from tests.contract.expectations import Target

CPU_RUNS: dict[str, tuple[str, dict[str, Any]]] = {}


@pytest.fixture
def partita(tmp_path: Path) -> Partita:
    """Run `partita` with arguments; it must not show a traceback, whatever happens."""

    def command(*arguments: object, **extra: str) -> Done:
        done = execute("-m", "partita", *arguments, folder=tmp_path, **extra)
        assert "Traceback" not in done.out + done.err, done
        return done

    return command


@pytest.fixture
def plain(tmp_path: Path) -> Partita:
    """Run a script that uses ONNX Runtime without Partita; `ort`, `np`, `sys` and `json` are imported for it."""

    def script(text: str, *arguments: object, **extra: str) -> Done:
        head = "import json, sys\nimport numpy as np\nimport onnxruntime as ort\n"
        return execute("-c", head + text, *arguments, folder=tmp_path, **extra)

    return script


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Write one of the files of `tests/contract/models.py`, by name."""
    return lambda name, **options: getattr(models, name)(tmp_path / f"{name}.onnx", **options)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    """Skip, or fail in CI, where the machine lacks what the test's target needs; partita itself is not asked."""
    target: Target | None = getattr(request.node, "callspec", None) and request.node.callspec.params.get("target")
    if target is not None:
        if why := wrong_processor(target):
            pytest.skip(why)
        if target.needs:
            require(target.needs, device_is_there(target))


@pytest.fixture
def cpu_run(partita: Partita, packages: Path, tmp_path: Path) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """What `generate` prints for a package on the CPU of this environment, and its report; run once for each."""

    def run(package: str) -> tuple[str, dict[str, Any]]:
        if package not in CPU_RUNS:
            report = tmp_path / "report-of-cpu.json"
            done = honoured(generated(partita, packages / package, "cpu", "--report", report))
            CPU_RUNS[package] = done.out, json.loads(report.read_text(encoding="utf-8"))
        return CPU_RUNS[package]

    return run


@pytest.fixture
def cpu_tokens(cpu_run: Callable[[str], tuple[str, dict[str, Any]]]) -> Callable[[str], str]:
    return lambda package: cpu_run(package)[0]


@pytest.fixture
def cpu_report(cpu_run: Callable[[str], tuple[str, dict[str, Any]]]) -> Callable[[str], dict[str, Any]]:
    return lambda package: cpu_run(package)[1]
