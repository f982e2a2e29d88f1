"""Generic providers (other ONNX Runtime names) and user-supplied plugin libraries."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from partita.errors import UsageError
from partita.providers.options import generic_provider, parse_libraries, split_libraries
from partita.providers.resolve import all_names, known_providers, parse_chain, resolve
from tests.commands.test_signals import NAMES_ENTRY
from tests.conftest import require


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A real, empty shared library."""
    require("a C compiler", shutil.which("cc") is not None)
    folder = tmp_path_factory.mktemp("library")
    (folder / "empty.c").write_text(NAMES_ENTRY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libempty.so", "empty.c"], cwd=folder, check=True)
    return folder / "libempty.so"


def test_named_library_becomes_a_provider(library):
    (provider,) = parse_libraries(split_libraries([f"MyEP={library}"]), all_names())
    assert (provider.name, provider.ort_name, provider.library) == ("myep", "MyEP", library)
    assert provider.any_option
    chain = parse_chain("myep,cpu", (provider,))
    assert [entry.name for entry in chain] == ["myep", "cpu"]
    first, second = resolve(chain, ("CPUExecutionProvider",), {"myep": {"a": "b"}})
    assert (first.status, first.library, first.options) == ("active", library, {"a": "b"})
    assert (second.status, second.library) == ("active", None)


def test_library_with_known_name_replaces_provider_and_has_its_options(library):
    (provider,) = parse_libraries(split_libraries([f"WebGPU={library}"]), all_names())
    assert provider.options == known_providers()["webgpu"].options
    assert provider.ort_name == "WebGpuExecutionProvider"
    (wgpu,) = parse_chain("wgpu", (provider,))
    assert wgpu.library == library


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: "no-separator", "write NAME=PATH"),
        (lambda folder: "=/tmp/x.so", "write NAME=PATH"),
        (lambda folder: "name=", "write NAME=PATH"),
        (lambda folder: f"a,b={folder}", "only letters"),
        (lambda folder: f"x={folder}", "is not a file; give the library file"),
        (lambda folder: f"x={folder / 'none.so'}", "does not exist"),
        (lambda folder: f"x={folder / 'empty.so'}", "not a provider plugin: it has no CreateEpFactories"),
        (lambda folder: f"x={folder / 'other.so'}", "not a provider plugin: it has no CreateEpFactories"),
    ],
)
def test_invalid_library_is_a_usage_error(tmp_path, make, says):
    (tmp_path / "empty.so").touch()
    (tmp_path / "other.so").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(UsageError, match=says) as caught:
        parse_libraries(split_libraries([make(tmp_path)]), all_names())
    assert "\n" not in str(caught.value)


def test_duplicate_library_name_is_a_usage_error(library):
    with pytest.raises(UsageError, match="given twice"):
        parse_libraries(split_libraries([f"x={library}", f"X={library}"]), all_names())


def test_other_onnxruntime_provider_name_is_accepted():
    chain = parse_chain("XnnpackExecutionProvider,cpu")
    assert chain[0] == generic_provider("XnnpackExecutionProvider")
    there, _ = resolve(chain, ("XnnpackExecutionProvider", "CPUExecutionProvider"))
    assert there.status == "active"
    missing, _ = resolve(chain, ("CPUExecutionProvider",))
    assert (missing.reason, missing.evidence) == (
        "not_in_build",
        "the installed ONNX Runtime contains CPUExecutionProvider",
    )


def test_tensorrt_rtx_is_distinct_from_tensorrt():
    (provider,) = parse_chain("NvTensorRTRTXExecutionProvider")
    assert provider.name == "tensorrt_rtx"
    assert parse_chain("nvtensorrtrtx") == (provider,)
    assert parse_chain("TensorrtExecutionProvider") == (known_providers()["tensorrt"],)
    with pytest.raises(UsageError, match="did you mean 'tensorrt'"):
        parse_chain("tensort")


def test_every_onnxruntime_provider_name_is_accepted():
    import onnxruntime

    ours = {provider.ort_name for provider in known_providers().values()}
    others = [name for name in onnxruntime.get_all_providers() if name not in ours]
    assert "XnnpackExecutionProvider" in others
    for name in others:
        assert parse_chain(name) == (generic_provider(name),), name


@pytest.mark.parametrize("word", ["CUDDAExecutionProvider", "OpenVinooExecutionProvider"])
def test_misspelled_provider_name_gets_suggestion(word):
    with pytest.raises(UsageError, match="did you mean"):
        parse_chain(word)


def test_provider_given_twice_in_chain_is_rejected(library):
    (provider,) = parse_libraries(split_libraries([f"webgpu={library}"]), all_names())
    with pytest.raises(UsageError, match="twice"):
        parse_chain("webgpu,WebGpuExecutionProvider", (provider,))
