"""CUDA dry run: stub libraries as seen by the CUDA provider and a C caller, in child processes."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from partita.errors import ProviderError, UsageError
from partita.providers.cuda_dry_run import stub_build, symbols
from partita.providers.cuda_dry_run.devices import CAPABILITIES, DEFAULT_DEVICE, DEVICES, Device, device
from partita.providers.cuda_dry_run.stub_build import child_environment, ensure_child, ensure_real, prepare
from tests.conftest import REPOSITORY, require

CHILD_SECONDS = 300
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


@pytest.fixture(autouse=True)
def supported_platform() -> None:
    require("Linux on x86-64", sys.platform == "linux" and platform.machine() == "x86_64")


def compiler() -> str:
    """A C compiler, or no test."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    require("a C compiler", found is not None)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def provider() -> Path:
    """The CUDA provider of the installed ONNX Runtime."""
    compiler()
    require("elftools")
    require("onnxruntime")
    try:
        return stub_build.provider_library()
    except ProviderError:
        require("the CUDA provider of onnxruntime-gpu", False)
        raise


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stubs(provider: Path, cache: Path) -> Path:
    return prepare(provider, cache=cache)


def run_child(
    code: str, environment: Mapping[str, str], *arguments: str, succeed: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child; the last line it prints is its answer."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert not succeed or done.returncode == 0, done.stderr[-2000:]
    return done


def ask(code: str, stubs: Path, on: Device | None = None, *arguments: str, base: Mapping[str, str] = os.environ) -> Any:
    """What `code` prints as JSON in a dry run."""
    done = run_child(code, child_environment(stubs, on or device(), base), *arguments)
    return json.loads(done.stdout.splitlines()[-1])


# ---- device profiles ----


def test_device_is_found_ignoring_case_else_suggested():
    for profile in DEVICES:
        assert device(f" {profile.key.upper()} ") is profile
        assert profile.capability in CAPABILITIES
    assert device() is device(DEFAULT_DEVICE) is device("h100")
    with pytest.raises(UsageError, match=r"unknown device 'h10'; did you mean 'h100'\? known devices: t4, .*h200"):
        device("h10")


def test_device_profile_sets_every_variable_read_by_stubs():
    read = set(re.findall(r'(?:profile|getenv)\("(\w+)"\)', symbols.c_text("cudart.c")))
    assert read == set(device().environment())


# ---- the table of functions ----


def test_stubs_export_their_functions_and_cover_the_provider(provider: Path, stubs: Path):
    from elftools.elf.elffile import ELFFile

    symbols.check_covered(provider, "the provider")
    assert {path.name for path in stubs.glob("*.so*")} == {library.soname for library in symbols.LIBRARIES}
    for library in symbols.LIBRARIES:
        with (stubs / library.soname).open("rb") as stream:
            table: Any = ELFFile(stream).get_section_by_name(".dynsym")
            exported = {
                symbol.name
                for symbol in table.iter_symbols()
                if symbol["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS") and symbol["st_info"]["bind"] == "STB_GLOBAL"
            }
        assert exported == library.names() and stub_build.MARKER in exported


def header_folder() -> Path:
    """Folder of driver_types.h of CUDA 13: the wheels nvidia-cuda-runtime and nvidia-cuda-crt, or an installed CUDA."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(root) / "cu13" / "include" for root in (spec.submodule_search_locations if spec else None) or ()]
    folders += [path / "include" for path in sorted(Path("/usr/local").glob("cuda-13*"))]
    found = next((path for path in folders if (path / "driver_types.h").is_file()), None)
    require("driver_types.h of CUDA 13 (nvidia-cuda-runtime and nvidia-cuda-crt)", found is not None)
    assert found is not None
    return found


def test_stub_struct_offsets_match_nvidia_header(tmp_path: Path):
    include = header_folder()
    names = set(re.findall(r"^ +PROP_(\w+) = ", symbols.c_text("cudart.c"), re.MULTILINE)) - {"BYTES"}
    assert len(names) > 20
    fields = {name: re.sub(r"_([a-z0-9])", lambda at: at[1].upper(), name.lower()) for name in names}
    checks = [
        "sizeof(struct cudaDeviceProp) == PROP_BYTES",
        "sizeof(struct cudaPointerAttributes) == POINTER_BYTES",
        "sizeof(struct cudaFuncAttributes) == FUNCTION_BYTES",
        "offsetof(struct cudaPointerAttributes, device) == 4",
        "offsetof(struct cudaPointerAttributes, devicePointer) == 8",
        "offsetof(struct cudaPointerAttributes, hostPointer) == 16",
        "offsetof(struct cudaFuncAttributes, maxThreadsPerBlock) == 24",
        "offsetof(struct cudaFuncAttributes, numRegs) == 28",
        "offsetof(struct cudaFuncAttributes, ptxVersion) == 32",
        "offsetof(struct cudaFuncAttributes, binaryVersion) == 36",
        "offsetof(struct cudaFuncAttributes, maxDynamicSharedSizeBytes) == 44",
        *(f"offsetof(struct cudaDeviceProp, {field}) == PROP_{name}" for name, field in fields.items()),
        *(f"(int){name} == {number}" for name, number in ATTRIBUTES.items()),
    ]
    enum = re.search(r"enum \{\s+PROP_BYTES.*?\};", symbols.c_text("cudart.c"), re.DOTALL)
    assert enum
    text = "#include <stddef.h>\n#include <driver_types.h>\n" + enum[0] + "\n"
    source = tmp_path / "offsets.c"
    source.write_text(text + "".join(f'_Static_assert({check}, "{check}");\n' for check in checks))
    done = subprocess.run(
        [compiler(), "-w", "-I", str(include), "-fsyntax-only", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- what a C caller is told ----

ATTRIBUTES = {
    "cudaDevAttrMultiProcessorCount": 16,
    "cudaDevAttrL2CacheSize": 38,
    "cudaDevAttrMaxThreadsPerMultiProcessor": 39,
    "cudaDevAttrComputeCapabilityMajor": 75,
    "cudaDevAttrComputeCapabilityMinor": 76,
    "cudaDevAttrMaxSharedMemoryPerMultiprocessor": 81,
    "cudaDevAttrCooperativeLaunch": 95,
    "cudaDevAttrMaxSharedMemoryPerBlockOptin": 97,
    "cudaDevAttrMaxBlocksPerMultiprocessor": 106,
    "cudaDevAttrMemoryPoolsSupported": 115,
    "cudaDevAttrClusterLaunch": 120,
}
PREAMBLE = """
import ctypes, json, sys
from ctypes import byref, c_int, c_size_t, c_void_p
cuda = ctypes.CDLL("libcudart.so.13")
def size(value): return c_size_t(value)
def malloc(count):
    at = c_void_p(); return cuda.cudaMalloc(byref(at), size(count)), at
"""
DESCRIBE = (
    PREAMBLE
    + """
attributes = json.loads(sys.argv[1])
record = ctypes.create_string_buffer(1008)
assert cuda.cudaGetDeviceProperties(record, 0) == 0
free, total, count, version = c_size_t(), c_size_t(), c_int(), c_int()
assert cuda.cudaMemGetInfo(byref(free), byref(total)) == 0
assert cuda.cudaGetDeviceCount(byref(count)) == 0
assert cuda.cudaRuntimeGetVersion(byref(version)) == 0
answers = {}
for name, number in attributes.items():
    value = c_int(-1)
    assert cuda.cudaDeviceGetAttribute(byref(value), number, 0) == 0, name
    answers[name] = value.value
unknown = cuda.cudaDeviceGetAttribute(byref(c_int()), 9999, 0)
print(json.dumps({
    "name": record.raw[:256].split(b"\\0")[0].decode(), "total": total.value, "free": free.value, "count": count.value,
    "memory": c_size_t.from_buffer(record, 288).value, "major": c_int.from_buffer(record, 360).value,
    "version": version.value, "attributes": answers, "unknown": unknown}))
"""
)


@pytest.mark.parametrize("key", ["t4", "h100"])
def test_same_stub_build_serves_every_device(stubs: Path, key: str):
    profile = device(key)
    told = ask(DESCRIBE, stubs, profile, json.dumps(ATTRIBUTES))
    assert told["name"] == f"{profile.name} (dry run)"
    assert told["total"] == told["free"] == told["memory"] == profile.memory_bytes
    assert (told["count"], told["version"], told["major"]) == (1, 13000, profile.capability[0])
    answers = told["attributes"]
    assert answers["cudaDevAttrComputeCapabilityMajor"] == profile.capability[0]
    assert answers["cudaDevAttrComputeCapabilityMinor"] == profile.capability[1]
    assert answers["cudaDevAttrMultiProcessorCount"] == profile.multiprocessors
    assert answers["cudaDevAttrMaxSharedMemoryPerBlockOptin"] == CAPABILITIES[profile.capability][3]
    assert answers["cudaDevAttrClusterLaunch"] == (profile.capability >= (9, 0))
    assert told["unknown"] == INVALID_VALUE  # refused, not answered with a made-up figure


def test_stub_memory_is_counted_reads_zero_and_uses_no_host_memory(stubs: Path):
    code = (
        PREAMBLE
        + """
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
error, large = malloc(70 << 30)
free, total = c_size_t(), c_size_t(); cuda.cudaMemGetInfo(byref(free), byref(total))
too_much = malloc(20 << 30)[0]
sticky = [cuda.cudaPeekAtLastError(), cuda.cudaGetLastError(), cuda.cudaGetLastError()]
host = ctypes.create_string_buffer(b"x" * 64, 64)
written = cuda.cudaMemcpy(large, host, size(64), 1)
read = cuda.cudaMemcpy(host, c_void_p(large.value + 12345), size(64), 2)
bulk = cuda.cudaMemset(large, 7, size(70 << 30))
inside, freed, twice = cuda.cudaFree(c_void_p(large.value + 256)), cuda.cudaFree(large), cuda.cudaFree(large)
after = c_size_t(); cuda.cudaMemGetInfo(byref(after), byref(total))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([error, total.value - free.value, too_much, sticky, written, read, host.raw.hex(), bulk,
                  inside, freed, twice, total.value - after.value, grown]))
"""
    )
    told = ask(code, stubs)
    error, used, too_much, sticky, written, read, host, bulk, inside, freed, twice, left, grown_kib = told
    assert (error, used, written, read, bulk, freed) == (0, 70 << 30, 0, 0, 0, 0)
    assert (too_much, sticky) == (OUT_OF_MEMORY, [OUT_OF_MEMORY, OUT_OF_MEMORY, 0])
    assert (inside, twice) == (INVALID_VALUE, INVALID_VALUE)
    assert host == "00" * 64
    assert left == 0
    assert grown_kib < 64 * 1024


# ---- sessions of the real CUDA provider ----

OPEN = """
import json, sys
from partita.providers.cuda_dry_run.stub_build import ensure_child
ensure_child()
import onnxruntime as ort
try:
    ort.InferenceSession(sys.argv[1], providers=["CUDAExecutionProvider", "CPUExecutionProvider"], enable_fallback=0)
    print(json.dumps(""))
except Exception as error:
    print(json.dumps(str(error)))
"""


def test_weights_above_device_memory_raise_onnxruntime_error(stubs: Path, tmp_path: Path):
    require("onnx")
    import numpy as np
    from onnx import helper, numpy_helper, save

    from tests.inspection.graphs import model

    weight = numpy_helper.from_array(np.ones((64, 1 << 15), np.float32), "w")
    save(model([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], [weight]), tmp_path / "model.onnx")
    small = Device("small", "small", (9, 0), 1 << 20, 1, 1, 1, (1, 1))
    assert "memory" in ask(OPEN, stubs, small, str(tmp_path / "model.onnx")).lower()


# ---- the cache ----


def test_cached_stub_build_needs_no_compiler(provider: Path, stubs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    assert prepare(provider, cache=cache) == stubs


def test_concurrent_builds_produce_single_folder(provider: Path, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from partita.providers.cuda_dry_run.stub_build import prepare; "
        "print(prepare(Path(sys.argv[1]), cache=Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(provider), str(tmp_path)]
    started = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [process.communicate(timeout=CHILD_SECONDS)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert folders[0] == folders[1]
    assert [path.name for path in tmp_path.iterdir()] == [Path(folders[0]).name]


# ---- what can be wrong ----


def refused(message: str, library: Path, cache: Path) -> None:
    """`prepare` ends in one line that matches, exit code 3, and leaves nothing behind."""
    with pytest.raises(ProviderError, match=message) as caught:
        prepare(library, cache=cache)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert not cache.is_dir() or list(cache.iterdir()) == []


def fake_provider(folder: Path, *, soname: str, function: str) -> Path:
    """A provider library that needs one function of one library, beside a main library that tells the version."""
    folder.mkdir()
    library, source = folder / soname, folder / "source.c"
    source.write_text(f"int {function}(void) {{ return 0; }}\n")
    build = [compiler(), "-shared", "-fPIC", "-o"]
    subprocess.run([*build, str(library), f"-Wl,-soname,{soname}", str(source)], check=True)
    source.write_text(f"int {function}(void); int use(void) {{ return {function}(); }}\n")
    provider = folder / stub_build.PROVIDER_LIBRARY
    subprocess.run([*build, str(provider), str(source), str(library)], check=True)
    (folder / "libonnxruntime.so.9.8.7").touch()
    return provider


@pytest.mark.parametrize(
    ("soname", "function", "message"),
    [
        ("libcudart.so.13", "cudaBrandNew", r"9\.8\.7\) needs functions that the dry run .*: cudaBrandNew;"),
        ("libcudart.so.12", "cudaMalloc", r"needs libcudart\.so\.12, .* it covers CUDA 13"),
        ("libcusparse.so.12", "cusparseCreate", r"needs libcusparse\.so\.12, for which the dry run has no stub"),
    ],
)
def test_provider_not_covered_by_stubs_is_rejected(tmp_path: Path, soname: str, function: str, message: str):
    require("elftools")
    refused(message, fake_provider(tmp_path / "ort", soname=soname, function=function), tmp_path / "c")


def test_missing_library_and_other_file_are_rejected(tmp_path: Path):
    require("elftools")
    refused(r"missing\.so: the CUDA provider cannot be read", tmp_path / "missing.so", tmp_path / "c")
    (tmp_path / "library.so").write_text("This is text.")
    refused(r"library\.so: not a shared library", tmp_path / "library.so", tmp_path / "c")


def test_missing_or_invalid_compiler_is_named(provider: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "nocc -m64")
    refused("CC=nocc -m64 was not found; install gcc or clang", provider, tmp_path / "c")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("none of cc, gcc and clang was found", provider, tmp_path / "c")


def test_unwritable_cache_error_names_cache_variable(provider: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    refused("cannot be written .*; set PARTITA_CACHE_DIR", provider, tmp_path / "file" / "cache")


def test_missing_cuda_provider_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = importlib.util.spec_from_file_location("onnxruntime", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ProviderError, match="has no CUDA provider .* is missing"):
        stub_build.provider_library()


# ---- never the wrong libraries ----

GUARD = "from partita.providers.cuda_dry_run import stub_build; print(stub_build.{}())"


def test_child_verifies_stub_build(stubs: Path, monkeypatch: pytest.MonkeyPatch):
    environment = child_environment(stubs, device(), os.environ)
    assert run_child(GUARD.format("ensure_child"), environment).stdout.strip() == stubs.name
    environment = {**child_environment(stubs, device(), {}), "LD_LIBRARY_PATH": "/nonexistent"}
    done = run_child(GUARD.format("ensure_child"), environment, succeed=False)
    # The second where CUDA is installed system-wide.
    assert re.search(
        r"ProviderError: dry run: (the stub of libcudart\.so\.13 cannot be loaded|"
        r"libcudart\.so\.13 in this process is not a stub)",
        done.stderr,
    )
    monkeypatch.delenv(stub_build.BUILD_VARIABLE, raising=False)
    with pytest.raises(ProviderError, match="not started as a dry run"):
        ensure_child()
    ensure_real()


def test_child_with_other_libraries_or_build_fails(stubs: Path, tmp_path: Path):
    source = tmp_path / "real.c"
    source.write_text("int cudaMalloc(void) { return 0; }\n")
    library = str(tmp_path / "libcudart.so.13")
    subprocess.run([compiler(), "-shared", "-Wl,-soname,libcudart.so.13", "-o", library, str(source)], check=True)
    environment = child_environment(stubs, device(), {"LD_LIBRARY_PATH": "/elsewhere"})
    assert environment["LD_LIBRARY_PATH"] == f"{stubs}:/elsewhere"
    done = run_child(GUARD.format("ensure_child"), {**environment, "LD_LIBRARY_PATH": str(tmp_path)}, succeed=False)
    assert "libcudart.so.13 in this process is not a stub" in done.stderr
    other = {**environment, stub_build.BUILD_VARIABLE: "another"}
    done = run_child(GUARD.format("ensure_child"), other, succeed=False)
    assert f"in this process is {stubs.name} instead of another" in done.stderr


def test_real_run_rejects_stubs(stubs: Path):
    environment = child_environment(stubs, device(), {})
    done = run_child(GUARD.format("ensure_real"), environment, succeed=False)
    assert "was started for a dry run" in done.stderr
    code = "import ctypes; ctypes.CDLL('libcudart.so.13'); " + GUARD.format("ensure_real")
    done = run_child(code, {"LD_LIBRARY_PATH": str(stubs)}, succeed=False)
    assert "ProviderError: libcudart.so.13 in this process is a stub" in done.stderr
