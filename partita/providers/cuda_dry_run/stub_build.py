"""Stub CUDA libraries: built once, cached, loaded in a child process.

The parent calls `prepare` and starts a child with `child_environment`. The child calls `ensure_child` before it opens a
session, so that a dry run never uses a real GPU; a real run calls `ensure_real`, so that it never uses a stub.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from partita.errors import ProviderError
from partita.files import CACHE_VARIABLE, cache_folder, temporary_directory
from partita.providers.cuda_dry_run.devices import DEFAULT_DEVICE, PREFIX, Device, device
from partita.providers.cuda_dry_run.symbols import CUDA_MAJOR, LIBRARIES, check_covered
from partita.remedies import split

PROVIDER_LIBRARY = "libonnxruntime_providers_cuda.so"
CUDA_VERSION = CUDA_MAJOR * 1000
"""Runtime and driver version that the stubs report, in CUDA's notation: 13000 is 13.0."""
CUDA_VERSION_TEXT = f"{CUDA_MAJOR}.0"
MARKER = "partita_standin_version"
"""Function of every stub, absent in NVIDIA's libraries, that returns the name of its build."""
BUILD_VARIABLE = PREFIX + "BUILD"
UNFINISHED = ".building-"
COMPILE_SECONDS = 120
KIND = "cuda-dry-run"
"""Kind of the cache folder."""
FLAGS = ("-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


def provider_library() -> Path:
    """The CUDA provider of the installed ONNX Runtime, found without importing it.

    Raises ProviderError when ONNX Runtime is not installed or has no CUDA provider.
    """
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise ProviderError("ONNX Runtime is not installed; install partita[gpu] for a dry run of CUDA")
    library = Path(spec.origin).parent / "capi" / PROVIDER_LIBRARY
    if not library.is_file():
        raise ProviderError(
            f"the installed ONNX Runtime has no CUDA provider ({library} is missing); "
            "install partita[gpu] into a separate environment for a dry run of CUDA"
        )
    return library


def prepare(provider_library: Path, *, cache: Path | None = None) -> Path:
    """Folder of stubs for every CUDA function that `provider_library` needs, from the cache or built now.

    The folder is named by the hash of the stubs' source. `cache`: folder of builds; by default in the cache folder, or
    temporary if that is off or not writable. Safe for concurrent processes. Raises ProviderError on other systems than
    Linux x86-64, for a library that is missing, for another CUDA version or with unknown functions, and if a C compiler
    or a writable cache is missing; InstallationError if pyelftools is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ProviderError(f"the dry run needs Linux on x86-64; this is {sys.platform} on {platform.machine()}")
    check_covered(provider_library, f"{provider_library} (ONNX Runtime {runtime_version(provider_library)})")
    sources = {library.soname: library.code() for library in LIBRARIES}
    build = hashlib.sha256(json.dumps([sources, FLAGS, CUDA_VERSION]).encode()).hexdigest()[:32]
    path = (cache or _own_cache() or Path(_of_this_process().name)).absolute()
    if any(mark in str(path) for mark in ":;$"):  # separators and variables of LD_LIBRARY_PATH
        raise ProviderError(
            f"{path}: the loader cannot use a path with ':', ';' or '$'; set {CACHE_VARIABLE} to another folder"
        )
    folder = path / build
    if folder.is_dir():
        return folder
    compiler = _find_compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent) as unfinished:
            made = Path(unfinished) / build
            made.mkdir()
            for soname, source in sources.items():
                _compile(made, soname, source, compiler)
            made.rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ProviderError(
            f"{folder.parent}: cannot be written ({error}); set {CACHE_VARIABLE} to a writable folder"
        ) from error
    return folder


def _own_cache() -> Path | None:
    """The folder of builds in the cache folder; None if it is off or not writable."""
    folder = cache_folder(KIND)
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder if os.access(folder, os.W_OK | os.X_OK) else None
    return None


def child_environment(stubs: Path, device: Device, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the variables for a child process that sees `device` through the libraries in the folder `stubs`.

    Real GPUs are hidden.
    """
    path = os.pathsep.join(part for part in (str(stubs), base.get("LD_LIBRARY_PATH", "")) if part)
    return {
        **{name: value for name, value in base.items() if not name.startswith(PREFIX)},
        **device.environment(),
        BUILD_VARIABLE: stubs.name,
        "LD_LIBRARY_PATH": path,
        "CUDA_VISIBLE_DEVICES": "",
    }


def ensure_child() -> str:
    """Load every stub in the child process, check that it belongs to the parent's build, and return the build's name.

    Call it before a session is opened. Raises ProviderError if the process was not started with `child_environment`, or
    a library is not a stub of that build.
    """
    expected = os.environ.get(BUILD_VARIABLE)
    if not expected:
        raise ProviderError(f"this process was not started as a dry run: {BUILD_VARIABLE} is not set")
    for library in LIBRARIES:
        try:
            loaded = _build_of(library.soname)
        except OSError as error:
            folder = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)[0]
            raise ProviderError(
                f"dry run: the stub of {library.soname} cannot be loaded: {error}; delete {folder}, it is built again"
            ) from error
        if loaded != expected:
            raise ProviderError(
                f"dry run: {library.soname} in this process is {loaded or 'not a stub'} instead of {expected}; "
                "it was loaded before, or from LD_PRELOAD"
            )
    return expected


def ensure_real() -> None:
    """Raise ProviderError if a stub is loaded in this process or would be; for a run on a real GPU, after session
    creation.
    """
    for library in LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):  # not loaded; on Windows, which has no stubs
            if _build_of(library.soname, os.RTLD_NOLOAD | os.RTLD_LAZY) is not None:
                raise ProviderError(f"{library.soname} in this process is a stub of the dry run; unset LD_LIBRARY_PATH")
    if os.environ.get(BUILD_VARIABLE):
        raise ProviderError(
            f"this process was started for a dry run ({BUILD_VARIABLE} is set) and cannot run on a real GPU"
        )


def _build_of(soname: str, mode: int = ctypes.DEFAULT_MODE) -> str | None:
    """Name of the build of a library; None if it is not a stub. Raises OSError if it cannot be loaded."""
    function = getattr(ctypes.CDLL(soname, mode=mode), MARKER, None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


_of_this_process = functools.cache(temporary_directory)
"""A temporary folder that is removed at the end of the process."""


def runtime_version(provider_library: Path) -> str:
    """Version of the ONNX Runtime in the folder of a provider library, from the name of its main library."""
    name = "libonnxruntime.so."
    found = (path.name.removeprefix(name) for path in provider_library.parent.glob(f"{name}*"))
    return next(found, "of unknown version")


def _find_compiler() -> list[str]:
    """Command of the C compiler: the variable CC, or the first of cc, gcc and clang. Raises ProviderError."""
    chosen = list(split(os.environ.get("CC", "")))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(command[0])
        if found:
            return [str(Path(found).absolute()), *command[1:]]  # it runs in another folder
    missing = f"CC={os.environ['CC']} was not found" if chosen else "none of cc, gcc and clang was found"
    raise ProviderError(f"the dry run needs a C compiler, but {missing}; install gcc or clang, or set CC")


def _compile(folder: Path, soname: str, source: str, compiler: list[str]) -> None:
    """Build one stub in `folder`, whose name it returns as its marker. Raises ProviderError with the first error.

    Its functions have the version `soname`, as those of NVIDIA have; the loader accepts it for symbols without one.
    """
    text, script = folder / "source.c", folder / "versions.map"
    text.write_text(source, encoding="utf-8")
    script.write_text(f"{soname} {{ global: *; }};\n", encoding="utf-8")
    defined = [f'-DPARTITA_BUILD="{folder.name}"', f"-DPARTITA_CUDA_VERSION={CUDA_VERSION}"]
    linked = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={script.name}"]
    # Relative names in the folder: a comma in a path would end a linker option.
    command = [*compiler, *FLAGS, *defined, *linked, "-o", soname, text.name]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"the C compiler {compiler[0]} could not build {soname}: {error}") from error
    finally:
        text.unlink()
        script.unlink()
    if done.returncode:
        lines = done.stderr.splitlines() or ["nothing"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise ProviderError(
            f"the C compiler {compiler[0]} could not build {soname} (exit code {done.returncode}): {first}; "
            "set CC to another one"
        )


def dry_environment(name: str | None = None) -> tuple[dict[str, str], str]:
    """Environment of a process that simulates a GPU, and the name of the GPU. Raises ProviderError, UsageError."""
    simulated = device(DEFAULT_DEVICE if name is None else name)
    return child_environment(prepare(provider_library()), simulated, os.environ), simulated.name
