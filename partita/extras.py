"""A library that is not installed: which extra of Partita brings it, and the command that installs it.

What an extra brings is read from the metadata of the installed Partita, so pyproject.toml stays the only list. Knows no
verb, and of the libraries only which one has several wheels.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType

from partita.errors import InstallationError, PartitaError, UsageError
from partita.remedies import Remedy

RUNTIME = "onnxruntime"
"""The module that comes in several wheels, of which exactly one may be installed."""
ALWAYS = ""
"""The extra of what `pip install partita` brings by itself."""
INSTALL = Remedy("", ("pip", "install", "partita"))
INSTALL_EXTRAS = Remedy("", ("pip", "install", "partita[{extras}]"))
INSTALL_RUNTIME = Remedy(
    "",
    ("pip", "install", "partita[{plain}]"),
    otherwise=Remedy("for other providers than the CPU one of {others} in place of {plain}, never two of them"),
)
UNINSTALL = Remedy(
    "they overwrite each other's files: install only the one you want, after",
    ("pip", "uninstall", "--yes", "{owners}"),
)
INSTALL_VERSIONS = Remedy("", ("pip", "install", "{versions}"))
PUT_BACK = Remedy("put its files back", ("pip", "install", "--force-reinstall", "--no-deps", "{owner}"))
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def explain(error: BaseException, *, foreign: bool = False) -> InstallationError | None:
    """An error that says how to install what `error` lacks; None when it is about something else.

    `error` may be an import that failed, an exception raised from one, or an attribute that a module without files
    lacks: what is left of a package whose files were removed imports as an empty one. `foreign`: explain modules, too,
    that Partita does not declare.
    """
    seen: BaseException | None = error
    while seen is not None:
        module = _module_of(seen)
        if module and distributions(module):
            return _explain(module, seen)
        if module and foreign and isinstance(seen, ModuleNotFoundError):
            return InstallationError(f"the Python module {module} is required and not installed")
        seen = seen.__cause__
    return None


def _module_of(error: BaseException) -> str:
    """The library whose import failed, by its first name; empty when `error` is nothing of the kind."""
    if isinstance(error, ImportError):
        module = (error.name or "").partition(".")[0]
        return "" if module == "partita" else module
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return "" if getattr(error.obj, "__file__", None) else error.obj.__name__.partition(".")[0]
    return ""


def _explain(module: str, error: BaseException) -> InstallationError:
    if _found(module):
        said = " ".join(str(error).split())
        failed = InstallationError(f"{module} is installed but does not load ({said})", remedy=_repair(module))
        if versions := unsupported_versions():
            failed.prefix(versions)
        return failed
    return InstallationError(_not_installed(_missing_beside(module)), remedy=remedy(module))


def _not_installed(modules: list[str]) -> str:
    """`torch and onnx_ir are not installed`."""
    *most, last = modules
    return f"{', '.join(most)} and {last} are not installed" if most else f"{last} is not installed"


def remedy(module: str) -> Remedy:
    """The command that brings `module`, which is declared and not there."""
    if _installed(distributions(module)):
        return _repair(module)  # pip believes that it is there, and would do nothing
    if ALWAYS in _extras_of(module):
        return INSTALL
    if module == RUNTIME:
        return runtime_remedy()
    extras = [_best_extra(module), *([] if _found(RUNTIME) else [_plain_runtime()])]
    return INSTALL_EXTRAS.filled(extras=",".join(extras))


def runtime_remedy() -> Remedy:
    """The command that brings an ONNX Runtime, and which others there are."""
    plain = _plain_runtime()
    others = sorted(_extras_of(RUNTIME) - {plain})
    return INSTALL_RUNTIME.filled(plain=plain, others=", ".join(others))


def _repair(module: str) -> Remedy:
    """The command that puts the files of an installed library back."""
    owners = _installed(distributions(module))
    if len(owners) > 1:
        return UNINSTALL.filled(owners=tuple(owners))
    return PUT_BACK.filled(owner=owners[0] if owners else module)


def _missing_beside(module: str) -> list[str]:
    """What is not installed of all that the extra of `module` brings, `module` first."""
    if ALWAYS in _extras_of(module) or module == RUNTIME:
        return [module]
    own = distributions(module)
    return [module, *(name for name in declared()[_best_extra(module)] if name not in own and not _installed([name]))]


def _best_extra(module: str) -> str:
    """The extra that brings `module` and the least beside it."""
    return min(_extras_of(module), key=lambda name: (len(declared()[name]), name))


def _plain_runtime() -> str:
    """The extra whose wheel is called as the module is, and that brings nothing else."""
    alone = [extra for extra, wheels in declared().items() if wheels == (RUNTIME,)]
    return alone[0] if alone else "cpu"


def _extras_of(module: str) -> set[str]:
    """Extras that bring `module`."""
    wanted = set(distributions(module))
    return {extra for extra, wheels in declared().items() if wanted.intersection(wheels)}


def distributions(module: str) -> tuple[str, ...]:
    """Declared distributions that install `module`, by their names: as the module, after py, or one of its wheels."""
    every = dict.fromkeys(name for wheels in declared().values() for name in wheels)
    name = _normal(module)
    own = [wheel for wheel in every if wheel in (name, f"py{name}")]
    if name == RUNTIME:
        own += [wheel for wheel in every if wheel.startswith(f"{RUNTIME}-") and _has_module(wheel)]
    return tuple(own)


def _has_module(wheel: str) -> bool:
    """Whether a wheel named after ONNX Runtime is one: it comes alone in its extra, a plugin beside one."""
    return any(wheels == (wheel,) for wheels in declared().values())


def _installed(names: Iterable[str]) -> list[str]:
    """Those of the distributions that pip takes for installed."""
    return [name for name in names if any(True for _ in metadata.distributions(name=name))]


def _found(module: str) -> bool:
    """Whether `module` could be imported, which is not tried. A folder without files is nothing."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


@cache
def declared() -> dict[str, tuple[str, ...]]:
    """Distributions that Partita declares, by extra; those it always needs are under `ALWAYS`."""
    read: dict[str, list[str]] = {}
    for line in _requirements():
        name = NAME.match(line)
        if name is None:
            continue
        extras = EXTRA.findall(line) or [ALWAYS]
        for extra in extras:
            read.setdefault(extra, []).append(_normal(name.group()))
    return {extra: tuple(dict.fromkeys(wheels)) for extra, wheels in read.items()}


@contextmanager
def checked_versions() -> Iterator[None]:
    """Put installed versions that pyproject.toml excludes in front of an error of the block, with the pip command.

    A mistake in the arguments passes as it is. An unexpected exception becomes an InstallationError then, because a
    changed interface is its likely cause.
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


def unsupported_versions() -> str:
    """A sentence that names installed packages whose version Partita excludes, and the pip command; empty for none."""
    from packaging.requirements import Requirement  # not at import time: `partita --help` imports this module

    found = {}
    for requirement in map(Requirement, _requirements()):
        if requirement.specifier and _installed([requirement.name]):
            version = metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                found[requirement.name] = (version, str(requirement.specifier))
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


def _normal(name: str) -> str:
    """A name as package indexes compare them (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
