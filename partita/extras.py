"""Python packages that Partita requires: install commands for missing ones, and unsupported versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType

from partita.errors import InstallationError, PartitaError, UsageError
from partita.remedies import Remedy

RUNTIME = "onnxruntime"
"""The module that several wheels install; exactly one of them may be installed."""
ALWAYS = ""
"""The extra of modules that `pip install partita` installs."""
BASE = (
    "filelock huggingface_hub jinja2 ml_dtypes numpy onnx packaging platformdirs psutil pydantic rich "
    "safetensors tokenizers transformers typer"
)
"""Modules of `pip install partita`."""
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(BASE.split(), ALWAYS),
    **dict.fromkeys(("torch", "onnxscript", "onnx_ir"), "export"),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), "serve"),
    "elftools": "dry-run",
    "gguf": "gguf",
    "pyarrow": "parquet",
    "prompt_toolkit": "chat",
    "ray": "ray",
    RUNTIME: "cpu",
}
"""Extra that installs a module."""
PLUGINS: Mapping[str, str] = {
    "onnxruntime_qnn": "qnn",
    "onnxruntime_ep_webgpu": "plugins",
    "onnxruntime_ep_openvino": "plugins",
}
"""Extra that installs a provider plugin next to an ONNX Runtime."""
OTHER_RUNTIMES = ("gpu", "openvino", "plugins", "qnn", "webgpu")
"""Other extras with an ONNX Runtime."""
WHEELS: Mapping[str, tuple[str, ...]] = {
    "elftools": ("pyelftools",),
    RUNTIME: (RUNTIME, "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
}
"""Distributions that install a module, if their names differ."""
INSTALL = Remedy("", ("pip", "install", "partita"))
INSTALL_EXTRAS = Remedy("", ("pip", "install", "partita[{extras}]"))
INSTALL_RUNTIME = Remedy(
    "",
    ("pip", "install", "partita[{plain}]"),
    alternative=Remedy("for providers other than CPU exactly one of {others} in place of {plain}"),
)
UNINSTALL = Remedy(
    "they overwrite each other's files; uninstall all, then install one wheel",
    ("pip", "uninstall", "--yes", "{owners}"),
)
INSTALL_VERSIONS = Remedy("", ("pip", "install", "{versions}"))
PUT_BACK = Remedy("put its files back", ("pip", "install", "--force-reinstall", "--no-deps", "{owner}"))


def explain(error: BaseException, *, foreign: bool = False) -> InstallationError | None:
    """An error with the command that installs the module whose import failed; None for other errors.

    A missing attribute of an empty module counts as a failed import (leftover folder of a removed package).
    `foreign`: include modules that Partita does not declare.
    """
    seen: BaseException | None = error
    while seen is not None:
        module = _module_of(seen)
        if module in EXTRAS or module in PLUGINS:
            return _explain(module, seen)
        if module and foreign and isinstance(seen, ModuleNotFoundError):
            return InstallationError(f"the Python module {module} is required and not installed")
        seen = seen.__cause__
    return None


def _module_of(error: BaseException) -> str:
    """The top-level package whose import failed; empty for Partita itself and other errors."""
    name = ""
    if isinstance(error, ImportError):
        name = error.name or ""
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = "" if getattr(error.obj, "__file__", None) else error.obj.__name__
    module = name.partition(".")[0]
    return "" if module == "partita" else module


def _explain(module: str, error: BaseException) -> InstallationError:
    if not _is_found(module):
        return InstallationError(f"{module} is not installed", remedy=remedy(module))
    message = " ".join(str(error).split())
    failed = InstallationError(f"{module} is installed but does not load ({message})", remedy=remedy(module))
    if versions := unsupported_versions():
        failed.prefix(versions)
    return failed


def remedy(module: str) -> Remedy:
    """The command that installs `module`, or reinstalls it if pip lists it as installed."""
    owners = [wheel for wheel in distributions(module) if any(True for _ in metadata.distributions(name=wheel))]
    if len(owners) > 1:
        return UNINSTALL.filled(owners=tuple(owners))
    if owners or _is_found(module):
        return PUT_BACK.filled(owner=owners[0] if owners else module)
    extra = EXTRAS.get(module) or PLUGINS.get(module, ALWAYS)
    if extra == ALWAYS:
        return INSTALL
    if module == RUNTIME:
        return runtime_remedy()
    own = ",".join((extra,) if _is_found(RUNTIME) or module in PLUGINS else (extra, EXTRAS[RUNTIME]))
    return INSTALL_EXTRAS.filled(extras=own)


def runtime_remedy() -> Remedy:
    """The command that installs an ONNX Runtime, with the alternatives."""
    return INSTALL_RUNTIME.filled(plain=EXTRAS[RUNTIME], others=", ".join(OTHER_RUNTIMES))


def distributions(module: str) -> tuple[str, ...]:
    """Declared distributions that install `module`."""
    return WHEELS.get(module, (module.replace("_", "-"),))


def _is_found(module: str) -> bool:
    """Whether `module` can be found, without importing it. A folder without files does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


@contextmanager
def checked_versions() -> Iterator[None]:
    """Prefix errors of the block with installed versions that pyproject.toml excludes, and the pip command.

    UsageError is unchanged. With unsupported versions, an unexpected exception becomes an InstallationError.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        versions = unsupported_versions()
        if not versions:
            raise
        if isinstance(error, PartitaError):
            error.prefix(versions)
            raise
        raise InstallationError(f"{versions}; {type(error).__name__}: {error}") from error


def excluded_versions() -> dict[str, tuple[str, str]]:
    """Installed packages whose version Partita excludes: the version, and the versions that it needs."""
    from packaging.requirements import Requirement  # not at import time: `partita --help` imports this module

    found = {}
    for requirement in map(Requirement, _requirements()):
        for wheel in metadata.distributions(name=requirement.name) if requirement.specifier else ():
            if not requirement.specifier.contains(wheel.version, prereleases=True):
                found[requirement.name] = (wheel.version, str(requirement.specifier))
    return found


def unsupported_versions() -> str:
    """A sentence with `excluded_versions`, and the pip command; empty for none."""
    found = excluded_versions()
    if not found:
        return ""
    installed = " and ".join(f"{name} {version}" for name, (version, _) in found.items())
    install = INSTALL_VERSIONS.filled(versions=tuple(f"{name}{bounds}" for name, (_, bounds) in found.items()))
    return f"{installed} {'is' if len(found) == 1 else 'are'} outside the supported range: {install}"


def _requirements() -> list[str]:
    """The requirements of the installed Partita, extras included."""
    try:
        return metadata.requires("partita") or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return []
