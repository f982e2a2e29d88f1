"""Stub CUDA libraries: built once per CUDA provider library, cached, loaded in a child process.

The parent calls `prepare` and starts a child with `child_environment`. The child calls `ensure_child` before it opens a
session, so that a dry run never uses a real GPU; a real run calls `ensure_real`, so that it never uses a stub.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partita.errors import ProviderError
from partita.files import CACHE_VARIABLE, cache_folder
from partita.providers.cuda_dry_run.devices import PREFIX, Device
from partita.providers.cuda_dry_run.symbols import (
    COMMON,
    CUDA_MAJOR,
    LIBRARIES,
    Library,
    c_text,
    exports,
    read_required,
)

PROVIDER_LIBRARY = "libonnxruntime_providers_cuda.so"
CUDA_VERSION = CUDA_MAJOR * 1000
"""Runtime and driver version that the stubs report, in CUDA's notation: 13000 is 13.0."""
MARKER = "partita_standin_version"
"""Function of every stub, absent in NVIDIA's libraries, that returns the name of its build."""
BUILD_VARIABLE = PREFIX + "BUILD"
RECORD = "standins.json"
UNFINISHED = ".building-"
UNFINISHED_SECONDS = 3600
"""Unfinished builds of this age were interrupted and may be deleted; a build takes seconds."""
COMPILE_SECONDS = 120
KIND = "cuda-dry-run"
"""Kind of the cache folder."""
FLAGS = ("-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


@dataclass(frozen=True, slots=True)
class StubLibraries:
    """Stub libraries on disk."""

    folder: Path
    build: str
    """Name of the build: a hash of what identifies the provider library, and of the stubs' source."""
    cuda_version: str
    """CUDA version that they report, e.g. 13.0."""
    libraries: tuple[str, ...]
    """File names, e.g. libcudart.so.13."""
    symbols: int
    """Number of exported functions without the markers."""
    built: bool
    """They were built by this call; False: from the cache."""


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


def prepare(provider_library: Path, *, cache: Path | None = None) -> StubLibraries:
    """Stubs for every CUDA function that `provider_library` needs, from the cache or built now.

    `cache`: folder of builds, by default `default_cache`. Safe for concurrent processes. Raises ProviderError on other
    systems than Linux x86-64, for a library that is missing, for another CUDA version or with unknown functions, and if
    pyelftools, a C compiler or a writable cache is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ProviderError(f"the dry run needs Linux on x86-64; this is {sys.platform} on {platform.machine()}")
    sources = {library.soname: _c_source(library) for library in LIBRARIES}
    build = _build_name(provider_library, sources)
    folder = _loadable(cache or default_cache()) / build
    found = _stored(folder)
    if found:
        return found
    label = f"{provider_library} (ONNX Runtime {runtime_version(provider_library)})"
    symbols_by_soname = exports(read_required(provider_library), label)
    compiler = _find_compiler()
    try:
        _build_all(folder, symbols_by_soname, sources, compiler)
    except OSError as error:
        raise ProviderError(
            f"{folder.parent}: cannot be written ({error}); set {CACHE_VARIABLE} to a writable folder"
        ) from error
    result = _stored(folder, built=True)
    if result is None:
        raise ProviderError(
            f"{folder}: a stub library is damaged after the build; delete the folder and run the command again"
        )
    return result


def _build_all(
    folder: Path,
    symbols_by_soname: Mapping[str, Mapping[str, str | None]],
    sources: Mapping[str, str],
    compiler: list[str],
) -> None:
    """Build every stub in a temporary folder next to `folder`, then rename it to `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        for soname, symbols in symbols_by_soname.items():
            _compile_library(unfinished, soname, sources[soname], symbols, folder.name, compiler)
        write_record(unfinished, folder.name, sum(map(len, symbols_by_soname.values())))
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def child_environment(stubs: StubLibraries, device: Device, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the variables for a child process that sees `device` through `stubs`; real GPUs are hidden."""
    path = os.pathsep.join(part for part in (str(stubs.folder), base.get("LD_LIBRARY_PATH", "")) if part)
    return {
        **{name: value for name, value in base.items() if not name.startswith(PREFIX)},
        **device.environment(),
        BUILD_VARIABLE: stubs.build,
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
            loaded = _marker(ctypes.CDLL(library.soname))
        except OSError as error:
            raise ProviderError(f"dry run: the stub of {library.soname} cannot be loaded: {error}") from error
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
    loaded = [library.soname for library in LIBRARIES if _marker_if_loaded(library.soname)]
    if loaded:
        raise ProviderError(f"{', '.join(loaded)} in this process is a stub of the dry run; unset LD_LIBRARY_PATH")
    if os.environ.get(BUILD_VARIABLE):
        raise ProviderError(
            f"this process was started for a dry run ({BUILD_VARIABLE} is set) and cannot run on a real GPU"
        )


def _marker(library: ctypes.CDLL) -> str | None:
    """Name of the build of a loaded library; None if it is not a stub."""
    try:
        function = getattr(library, MARKER)
    except AttributeError:
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


def _marker_if_loaded(soname: str) -> str | None:
    """Name of the build of `soname` in this process; None if it is not loaded or not a stub."""
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows, for which there are no stubs
        return None
    try:
        return _marker(ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    except OSError:
        return None


def default_cache() -> Path:
    """Folder of builds: in the cache folder, or temporary without one. Raises ProviderError if neither is writable."""
    folder = cache_folder(KIND)
    if folder is not None and _can_be_written(folder):
        return folder
    try:
        return Path(_of_this_process().name)
    except OSError as error:
        raise ProviderError(
            f"no writable folder for the stub libraries ({error}); set {CACHE_VARIABLE} to a folder"
        ) from error


def _can_be_written(folder: Path) -> bool:
    """Whether the folder exists or can be created, and is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that is removed at the end of the process."""
    return tempfile.TemporaryDirectory(prefix="partita-", ignore_cleanup_errors=True)


def _loadable(cache: Path) -> Path:
    """The absolute path of `cache`. Raises ProviderError for characters with a meaning in LD_LIBRARY_PATH."""
    path = cache.absolute()
    if any(mark in str(path) for mark in ":;$"):  # separators and variables of LD_LIBRARY_PATH
        raise ProviderError(
            f"{path}: the loader cannot use a path with ':', ';' or '$'; set {CACHE_VARIABLE} to another folder"
        )
    return path


def _c_source(library: Library) -> str:
    """C source of one stub."""
    parts = [f'#line 1 "{COMMON}"', c_text(COMMON)]
    if library.source:
        parts += [f'#line 1 "{library.source}"', library.code()]
    return "\n".join([*parts, *(f"HARMLESS({name})" for name in library.harmless_names()), ""])


def _build_name(provider_library: Path, sources: Mapping[str, str]) -> str:
    """Name of the build for this library and source. Raises ProviderError if the library cannot be read.

    The library is identified by ONNX Runtime's version, its size and the time of its last change: to read it all took a
    sixth of a second.
    """
    try:
        with provider_library.open("rb") as stream:
            found = os.fstat(stream.fileno())
    except OSError as error:
        raise ProviderError(
            f"{provider_library}: the CUDA provider cannot be read ({error.strerror}); install partita[gpu]"
        ) from error
    inputs = [runtime_version(provider_library), found.st_size, found.st_mtime_ns, sources, FLAGS, CUDA_VERSION]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


def runtime_version(provider_library: Path) -> str:
    """Version of the ONNX Runtime in the folder of a provider library, from the name of its main library."""
    name = "libonnxruntime.so."
    return next(
        (path.name.removeprefix(name) for path in provider_library.parent.glob(f"{name}*")), "of unknown version"
    )


def _find_compiler() -> list[str]:
    """Command of the C compiler: the variable CC, or the first of cc, gcc and clang. Raises ProviderError."""
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise ProviderError(f"CC={os.environ['CC']} is not a command ({error}); set CC to a C compiler") from error
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(command[0])
        if found:
            return [str(Path(found).absolute()), *command[1:]]  # it runs in another folder
    missing = f"CC={os.environ['CC']} was not found" if chosen else "none of cc, gcc and clang was found"
    raise ProviderError(f"the dry run needs a C compiler, but {missing}; install gcc or clang, or set CC")


def _compile_library(
    folder: Path, soname: str, source: str, symbols: Mapping[str, str | None], build: str, compiler: list[str]
) -> None:
    """Build one stub in `folder`. Raises ProviderError with the compiler's first error."""
    text, script = folder / "source.c", folder / "versions.map"
    text.write_text(source, encoding="utf-8")
    script.write_text(_version_script(symbols), encoding="utf-8")
    command = [
        *compiler,
        *FLAGS,
        f'-DPARTITA_BUILD="{build}"',
        f"-DPARTITA_CUDA_VERSION={CUDA_VERSION}",
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={script.name}",
        "-o",
        soname,
        text.name,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,  # relative names: a comma in a path would end a linker option
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
        errors = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["nothing"]
        )
        raise ProviderError(
            f"the C compiler {compiler[0]} could not build {soname} (exit code {done.returncode}): {errors[0]}; "
            "set CC to another one"
        )


def _version_script(symbols: Mapping[str, str | None]) -> str:
    """Linker script that exports `symbols` with their versions and the marker.

    Symbols without a version get the first version of the library, which the loader accepts.
    """
    by_version: dict[str, list[str]] = {}
    first = next((version for version in symbols.values() if version), "")
    for name, version in [*symbols.items(), (MARKER, None)]:
        by_version.setdefault(version or first, []).append(name)
    hidden = " local: *;"
    nodes = []
    for version, names in by_version.items():
        nodes.append(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))}{hidden} }};".lstrip())
        hidden = ""
    return "\n".join(nodes) + "\n"


def write_record(folder: Path, build: str, symbols: int) -> None:
    """Write the file sizes of the folder, to detect damage."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps({"build": build, "symbols": symbols, "files": files}), encoding="utf-8")


def _stored(folder: Path, *, built: bool = False) -> StubLibraries | None:
    """The stubs in `folder`; None if it is missing or damaged."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files, symbols = dict(record["files"]), int(record["symbols"])
        whole = record["build"] == folder.name and all(
            (folder / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    version = f"{CUDA_VERSION // 1000}.{CUDA_VERSION % 1000 // 10}"
    return StubLibraries(folder, folder.name, version, tuple(files), symbols, built) if whole and files else None


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename a finished build to `folder`. A build of another process stays; a damaged build is replaced."""
    if _stored(folder):
        return
    try:
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent)) / "damaged")
        unfinished.rename(folder)
    except OSError:
        if not _stored(folder):  # otherwise another process was faster
            raise


def _remove_unfinished(cache: Path) -> None:
    """Delete folders of interrupted builds."""
    for path in cache.glob(f"{UNFINISHED}*"):
        try:
            old = time.time() - path.stat().st_mtime > UNFINISHED_SECONDS
        except OSError:  # another process deleted it
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)
