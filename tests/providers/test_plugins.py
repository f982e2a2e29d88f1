"""Plugin packages: library lookup, options, and broken packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from partita.providers import resolve
from partita.providers.base import Option, Plugin, Provider
from partita.providers.resolve import resolve_one

PROBE = Provider(
    name="probe",
    ort_name="ProbeExecutionProvider",
    plugin=Plugin(
        "onnxruntime-probe",
        "onnxruntime_probe_for_tests",
        (("backend_path", "get_backend_path"),),
        yields_to=("backend_type",),
        ignores=("threads",),
    ),
    options=(Option("backend_path", "path", "", "where"), Option("backend_type", "text", "", "which")),
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin package of one module; returns a function that writes the module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(resolve, "installed_version", lambda wheel: "1.0")
    monkeypatch.delitem(sys.modules, "onnxruntime_probe_for_tests", raising=False)
    (tmp_path / "libep.so").touch()

    def write(library: str = "libep.so", extra: str = "") -> Path:
        source = f"{extra}\ndef get_library_path():\n    return {str(tmp_path / library)!r}\n"
        source += "def get_backend_path():\n    return '/backend.so'\n"
        (tmp_path / "onnxruntime_probe_for_tests.py").write_text(source)
        return tmp_path / library

    yield write
    sys.modules.pop("onnxruntime_probe_for_tests", None)


def test_installed_plugin_is_active_with_library_and_options(package):
    library = package()
    found = resolve_one(PROBE, (), {"other": "1"})
    assert (found.status, found.library) == ("active", library)
    assert found.options == {"backend_path": "/backend.so", "other": "1"}


def test_user_options_override_plugin_paths(package):
    package()
    assert resolve_one(PROBE, (), {"backend_path": "/mine.so"}).options == {"backend_path": "/mine.so"}
    assert resolve_one(PROBE, (), {"backend_type": "cpu"}).options == {"backend_type": "cpu"}


def test_option_ignored_by_plugin_is_rejected(package):
    package()
    found = resolve_one(PROBE, (), {"threads": "2"})
    assert (found.status, found.reason) == ("unavailable", "option_rejected")
    assert found.evidence == "onnxruntime-probe 1.0 ignores threads"
    assert resolve_one(PROBE, ("ProbeExecutionProvider",), {"threads": "2"}).status == "active"


def test_built_in_provider_takes_precedence_over_plugin(package):
    package()
    found = resolve_one(PROBE, ("ProbeExecutionProvider",))
    assert (found.status, found.library, dict(found.options)) == ("active", None, {})


@pytest.mark.parametrize(
    ("library", "extra", "reason", "says"),
    [
        ("gone.so", "", "library_missing", "which does not exist"),
        ("libep.so", "raise RuntimeError('no\\nluck')", "initialisation_failed", "RuntimeError: no luck"),
        ("libep.so", "import no_such_module_at_all", "initialisation_failed", "ModuleNotFoundError"),
    ],
)
def test_broken_plugin_package_is_unavailable_with_reason(package, library, extra, reason, says):
    package(library, extra)
    found = resolve_one(PROBE, ())
    assert (found.status, found.reason) == ("unavailable", reason)
    assert says in (found.evidence or "")
    assert (found.evidence or "").startswith("onnxruntime-probe 1.0 ")
    assert found.remedy


def test_missing_package_is_reported_as_not_in_build():
    assert resolve_one(PROBE, ("CPUExecutionProvider",)).reason == "not_in_build"
