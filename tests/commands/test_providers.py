"""`partita providers` and `partita doctor`: text, JSON and findings about a broken installation."""

from __future__ import annotations

import io
import json
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from partita import extras
from partita.cli import run
from partita.commands import place
from partita.errors import UsageError
from partita.machine import EnvironmentFinding, MachineReport, ProviderEntry
from partita.options.inspection import ProvidersCommand
from partita.providers.resolve import known_providers
from partita.runtime.machine import Wheel, describe_machine, environment_findings
from partita.runtime.ort.registry import available_ort_names
from tests.conftest import REPOSITORY
from tests.views import print_text

SCHEMA = REPOSITORY / "docs" / "providers.schema.json"


@pytest.fixture(scope="module")
def machine() -> MachineReport:
    """This machine, looked at once."""
    return describe_machine()


def entry(report: MachineReport, name: str) -> ProviderEntry:
    return next(provider for provider in report.providers if provider.name == name)


def text_of(report: MachineReport, width: int = 80) -> str:
    stream = io.StringIO()
    print_text(report, "partita.machine", Console(file=stream, width=width, color_system=None, force_terminal=False))
    return stream.getvalue()


def test_machine_report_lists_providers_options_and_versions(machine):
    assert {provider.name for provider in machine.providers} >= set(known_providers())
    assert entry(machine, "cpu").usable
    for provider in machine.providers:
        told = (provider.reason, provider.evidence, provider.remedy)
        assert all(told) != provider.usable, provider
        assert provider.in_build == (provider.ort_name in available_ort_names())
    options = {option.name: option for option in entry(machine, "cuda").options}
    assert (options["device_id"].kind, options["device_id"].default) == ("int", "0")
    assert options["arena_extend_strategy"].choices == ("kNextPowerOfTwo", "kSameAsRequested")
    assert machine.onnxruntime.version == metadata.version(machine.onnxruntime.packages[0].partition(" ")[0])
    assert machine.default_chain[-1] == "cpu" and machine.default_reason and machine.findings == ()
    assert machine.onnxruntime.cuda == ("13.0" if "CUDAExecutionProvider" in available_ort_names() else None)


def test_provider_table_fits_80_columns_without_colour(machine):
    shown = text_of(machine)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    table = shown.partition("Providers\n")[2].partition("usable: ran")[0]
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.split()}
    assert lines["cpu"][1:3] == ["yes", "yes"]
    for provider in machine.providers:
        if not provider.usable:
            assert f"{provider.name}: {provider.reason}" in shown
    assert f"default chain: {','.join(machine.default_chain)}" in shown


def test_providers_json_matches_published_schema(capsys, monkeypatch, machine):
    monkeypatch.setattr("partita.runtime.machine.describe_machine", lambda extra: machine)
    monkeypatch.setattr("partita.library.planning.stored_rates", lambda: None)
    place.providers(ProvidersCommand(as_json=True))
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert printed["schema"] == "partita.providers/1"
    assert MachineReport.model_validate(printed) == machine
    place.providers(ProvidersCommand())
    captured = capsys.readouterr()
    assert captured.out.startswith("usable: ") and captured.err == ""


def test_doctor_prints_versions_providers_and_problems(capsys, monkeypatch, machine):
    twice = EnvironmentFinding(reason="duplicate_runtime", evidence="onnxruntime 1.31 and 1.24", remedy="uninstall one")
    lame = machine.model_copy(update={"findings": (twice,)})
    monkeypatch.setattr("partita.runtime.machine.describe_machine", lambda extra: machine)
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"numpy         {metadata.version('numpy')}\n" in out
    assert f"python        {platform.python_version()}\n" in out
    assert "\nusable: " in out and all(each.name in out for each in machine.providers)
    monkeypatch.setattr("partita.runtime.machine.describe_machine", lambda extra: lame)
    assert run(["doctor"]) == 0
    assert "duplicate_runtime: onnxruntime 1.31 and 1.24" in capsys.readouterr().out
    assert run(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, json.loads((REPOSITORY / "docs" / "doctor.schema.json").read_text(encoding="utf-8")))
    assert printed["machine"]["findings"][0]["reason"] == "duplicate_runtime"


def test_doctor_does_not_import_heavy_libraries():
    script = (
        "import sys; from partita.cli import run; code = run(['doctor']); "
        "heavy = [m for m in ('torch', 'onnxruntime', 'transformers', 'onnx') if m in sys.modules]; "
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"


def test_missing_provider_library_is_rejected_before_probing(monkeypatch):
    monkeypatch.setattr("partita.runtime.machine.describe_machine", lambda extra: pytest.fail("it was tried"))
    with pytest.raises(UsageError, match="does not exist"):
        place.providers(ProvidersCommand(provider_libraries={"x": "/no/such/library.so"}))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ImportError('libonnxruntime.so.1: cannot open shared object file')",
            "ImportError: libonnxruntime.so.1",
        ),
        ("import os; os.abort()", "killed by SIGABRT while loading ONNX Runtime"),
    ],
)
def test_onnx_runtime_import_failure_is_a_finding(tmp_path, monkeypatch, source, says):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(source + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = describe_machine()
    (finding,) = report.findings
    assert finding.reason == "initialisation_failed"
    assert says in finding.evidence
    assert "pip install --force-reinstall" in finding.remedy
    assert report.onnxruntime.version is None
    assert report.default_chain == ()
    assert not any(provider.usable for provider in report.providers)
    assert "no provider is usable" in text_of(report)


def test_duplicate_onnx_runtime_wheels_are_a_finding(tmp_path):
    """Uses real metadata on sys.path, in a separate process."""
    for name, version in (("onnxruntime", "1.31.0"), ("onnxruntime-openvino", "1.24.1"), ("onnxruntime-tools", "9")):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file = "onnxruntime/__init__.py" if name != "onnxruntime-tools" else "onnxruntime_tools/__init__.py"
        (folder / "RECORD").write_text(f"{file},sha256=x,1\n{folder.name}/RECORD,,\n")
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from partita.runtime.machine import *; "
        "print(json.dumps([runtime_wheels(), [f.model_dump() for f in "
        "environment_findings((), imported_version='1.31.0', import_error=None)]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    owners, (finding,) = json.loads(done.stdout)
    assert {tuple(owner[:2]) for owner in owners} >= {("onnxruntime", "1.31.0"), ("onnxruntime-openvino", "1.24.1")}
    assert "onnxruntime-tools" not in {owner[0] for owner in owners}
    assert finding["reason"] == "duplicate_runtime"
    assert "onnxruntime 1.31.0" in finding["evidence"]
    assert "onnxruntime-openvino 1.24.1" in finding["evidence"]
    assert "overwrote each other's files" in finding["evidence"]
    assert finding["remedies"][0]["command"][:4] == ["pip", "uninstall", "--yes", "onnxruntime"]


A = (Wheel("onnxruntime", "1.31.1", "/a"),)
FINDINGS: list[Any] = [
    ((), {"onnxruntime-qnn": "2.7.0"}, None, "not_in_build", "onnxruntime-qnn 2.7.0 needs ONNX Runtime"),
    ((), {}, None, "not_in_build", "ONNX Runtime is not installed"),
    (A, {}, "1.24.0", "version_mismatch", "the onnxruntime that Python imports is 1.24.0"),
    (
        (Wheel("onnxruntime", "1.31.1", "/first"), Wheel("onnxruntime-gpu", "1.31.1", "/second")),
        *({}, "1.31.1", "duplicate_runtime", "onnxruntime 1.31.1 in /first hides onnxruntime-gpu 1.31.1"),
    ),
]


@pytest.mark.parametrize(
    ("wheels", "plugins", "version", "reason", "said"), FINDINGS, ids=lambda value: str(value)[:20]
)
def test_problem_of_the_environment_is_a_finding(monkeypatch, wheels, plugins, version, reason, said):
    monkeypatch.setattr("partita.runtime.machine.plugin_wheels", lambda providers: plugins)
    monkeypatch.setattr("partita.runtime.machine.runtime_wheels", lambda: wheels)
    error = None if version else "ModuleNotFoundError"
    (finding,) = environment_findings(tuple(known_providers().values()), imported_version=version, import_error=error)
    assert finding.reason == reason and said in finding.evidence
    assert version or 'pip install "partita[cpu]"' in finding.remedy


def test_unsupported_dependency_version_is_a_finding(monkeypatch):
    monkeypatch.setattr(extras, "_requirements", lambda: ["numpy>=1", "transformers>=4,<5; extra == 'export'"])
    monkeypatch.setattr("partita.runtime.machine.runtime_wheels", lambda: (Wheel("onnxruntime", "1.31.1", "/a"),))
    (finding,) = environment_findings((), imported_version="1.31.1", import_error=None)
    assert finding.reason == "version_mismatch"
    assert finding.evidence == f"transformers {metadata.version('transformers')} is not supported; Partita needs <5,>=4"
    assert finding.remedies[0].command == ("pip", "install", "transformers<5,>=4")


def test_plugin_requiring_other_runtime_version_is_a_finding(monkeypatch):
    needs = ["numpy>=1", "onnxruntime>=1.40", "onnxruntime-gpu>=9; extra == 'gpu'"]
    monkeypatch.setattr("partita.runtime.machine.plugin_wheels", lambda providers: {"onnxruntime-qnn": "2.7.0"})
    monkeypatch.setattr("partita.runtime.machine.installed_version", lambda wheel: "2.7.0")
    monkeypatch.setattr("partita.runtime.machine.runtime_wheels", lambda: (Wheel("onnxruntime", "1.31.1", "/a"),))
    monkeypatch.setattr(metadata, "requires", lambda wheel: needs if wheel == "onnxruntime-qnn" else [])
    (finding,) = environment_findings((), imported_version="1.31.1", import_error=None)
    assert finding.reason == "version_mismatch"
    assert finding.evidence == "onnxruntime-qnn 2.7.0 requires onnxruntime>=1.40, and onnxruntime 1.31.1 is installed"
    assert finding.remedies[0].command == ("pip", "install", "onnxruntime>=1.40")
