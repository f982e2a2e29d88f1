"""Provider chains and plugin libraries: names, suggestions, and availability."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partita.errors import UsageError
from partita.providers import resolve as resolving
from partita.providers.base import Option, Plugin, Provider
from partita.providers.options import generic_provider, parse_libraries
from partita.providers.resolve import (
    all_names,
    known_providers,
    parse_chain,
    resolve,
    resolve_one,
)
from partita.remedies import Remedy
from tests.commands.test_signals import NAMES_ENTRY
from tests.conftest import require


def provider(name: str, aliases: tuple[str, ...] = (), remedy: str = "") -> Provider:
    return Provider(
        name=name,
        ort_name=f"{name.title()}ExecutionProvider",
        aliases=aliases,
        wheels=(f"onnxruntime-{name}",),
        remedies={"not_in_build": Remedy(remedy)} if remedy else {},
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("cpu,", "empty item"),
        ("cpu,cpu", "twice"),
        ("cpu,CPUExecutionProvider", "twice"),
        ("cpx", "did you mean 'cpu'"),
        ("quantum", "known providers: "),
        ("tpu", "unknown provider 'tpu'; known providers"),
        ("CUDDAExecutionProvider", "did you mean"),
    ],
)
def test_invalid_chain_is_a_usage_error(text, says):
    with pytest.raises(UsageError, match=says):
        parse_chain(text)


def test_names_of_providers_are_unique():
    names = [name.lower() for entry in known_providers().values() for name in entry.names()]
    assert len(names) == len(set(names))


def test_provider_missing_from_build_has_evidence_and_remedy():
    wanted, with_remedy = provider("fpga"), provider("dsp", remedy="buy one")
    found = resolve((wanted, with_remedy, known_providers()["cpu"]), ("CPUExecutionProvider",))
    assert [entry.status for entry in found] == ["unavailable", "unavailable", "active"]
    assert found[0].reason == "not_in_build"
    assert "CPUExecutionProvider" in (found[0].evidence or "")
    assert found[0].remedy is not None and found[0].remedy.command == ("pip", "install", "onnxruntime-fpga")
    assert found[1].remedy == Remedy("buy one")
    assert (found[2].reason, found[2].evidence, found[2].remedy) == (None, None, None)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("gpu", "'cuda' or 'webgpu'"),
        ("metal", "'webgpu' or 'coreml'"),
        ("rocm", "'migraphx'"),
        ("npu", "'openvino' or 'coreml' or 'qnn'"),
        ("nvida", "'cuda'"),
    ],
)
@pytest.mark.parametrize("argument", ["providers", "target"])
def test_unknown_provider_error_suggests_known_names(word, meant, argument):
    with pytest.raises(UsageError, match=rf"did you mean {meant}\? known providers: ") as caught:
        parse_chain(f"{word},cpu", argument=argument)
    listed = str(caught.value).partition("known providers: ")[2]
    assert all(name.strip("'") in listed for name in meant.split(" or "))
    assert caught.value.remedy is not None
    option, chain = caught.value.remedy.options
    assert option == {"providers": "--provider", "target": "--target"}[argument]
    assert [provider.name for provider in parse_chain(chain)] == [meant.split("'")[1], "cpu"]


# Libraries that the user names


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A real, empty shared library."""
    require("a C compiler", shutil.which("cc") is not None)
    folder = tmp_path_factory.mktemp("library")
    (folder / "empty.c").write_text(NAMES_ENTRY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libempty.so", "empty.c"], cwd=folder, check=True)
    return folder / "libempty.so"


def test_named_library_becomes_a_provider(library):
    (provider,) = parse_libraries({"MyEP": library}, all_names())
    assert (provider.name, provider.ort_name, provider.library) == ("myep", "MyEP", library)
    assert provider.any_option
    chain = parse_chain("myep,cpu", (provider,))
    assert [entry.name for entry in chain] == ["myep", "cpu"]
    first, second = resolve(chain, ("CPUExecutionProvider",), {"myep": {"a": "b"}})
    assert (first.status, first.library, first.options) == ("active", library, {"a": "b"})
    assert (second.status, second.library) == ("active", None)


def test_library_with_known_name_replaces_provider_and_has_its_options(library):
    (provider,) = parse_libraries({"WebGPU": library}, all_names())
    assert provider.options == known_providers()["webgpu"].options
    assert provider.ort_name == "WebGpuExecutionProvider"
    (wgpu,) = parse_chain("wgpu", (provider,))
    assert wgpu.library == library


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("a,b", "other.so", "only letters"),
        ("x", "", "is not a file; give the path"),
        ("x", "none.so", "does not exist"),
        ("x", "empty.so", "not a provider plugin: it has no CreateEpFactories"),
        ("x", "other.so", "not a provider plugin: it has no CreateEpFactories"),
    ],
)
def test_invalid_library_is_a_usage_error(tmp_path, name, file, says):
    (tmp_path / "empty.so").touch()
    (tmp_path / "other.so").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(UsageError, match=says) as caught:
        parse_libraries({name: tmp_path / file}, all_names())
    assert "\n" not in str(caught.value)


def test_provider_given_twice_is_a_usage_error(library):
    with pytest.raises(UsageError, match="given twice"):
        parse_libraries({"x": library, "X": library}, all_names())
    with pytest.raises(UsageError, match="twice"):
        parse_chain("webgpu,WebGpuExecutionProvider", parse_libraries({"webgpu": library}, all_names()))


def test_other_onnxruntime_provider_name_is_accepted():
    xnnpack = "XnnpackExecutionProvider"
    chain = parse_chain(f"{xnnpack},cpu")
    assert chain[0] == generic_provider(xnnpack)
    assert resolve(chain, (xnnpack, "CPUExecutionProvider"))[0].status == "active"
    (missing, _) = resolve(chain, ("CPUExecutionProvider",))
    evidence = "the installed ONNX Runtime contains CPUExecutionProvider"
    assert (missing.reason, missing.evidence) == ("not_in_build", evidence)


# Plugin packages


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
    monkeypatch.setattr(resolving, "installed_version", lambda wheel: "1.0")
    monkeypatch.delitem(sys.modules, "onnxruntime_probe_for_tests", raising=False)
    (tmp_path / "libep.so").touch()

    def write(library: str = "libep.so", extra: str = "") -> Path:
        source = f"{extra}\ndef get_library_path():\n    return {str(tmp_path / library)!r}\n"
        source += "def get_backend_path():\n    return '/backend.so'\n"
        (tmp_path / "onnxruntime_probe_for_tests.py").write_text(source)
        return tmp_path / library

    yield write
    sys.modules.pop("onnxruntime_probe_for_tests", None)


BUILT_IN = ("ProbeExecutionProvider",)


@pytest.mark.parametrize(
    ("available", "given", "options"),
    [
        ((), {"other": "1"}, {"backend_path": "/backend.so", "other": "1"}),
        ((), {"backend_path": "/mine.so"}, {"backend_path": "/mine.so"}),
        ((), {"backend_type": "cpu"}, {"backend_type": "cpu"}),
        (BUILT_IN, {"threads": "2"}, {"threads": "2"}),
    ],
)
def test_installed_plugin_is_active_with_library_and_options(package, available, given, options):
    library = package()
    found = resolve_one(PROBE, available, given)
    assert (found.status, found.library, found.options) == ("active", None if available else library, options)


def test_option_ignored_by_plugin_is_rejected(package):
    package()
    found = resolve_one(PROBE, (), {"threads": "2"})
    assert (found.status, found.reason) == ("unavailable", "option_rejected")
    assert found.evidence == "onnxruntime-probe 1.0 ignores threads"


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
