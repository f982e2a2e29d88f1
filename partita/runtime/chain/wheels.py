"""Installed Python packages with ONNX Runtime and its plugins, and conflicts between them, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from partita import extras
from partita.machine import EnvironmentFinding
from partita.observations.records import remedy_records
from partita.observations.text_format import listing
from partita.providers.base import Provider
from partita.providers.resolve import installed_version
from partita.remedies import Remedy

REINSTALL = Remedy("reinstall it to restore its files", ("pip", "install", "--force-reinstall", "{wheel}=={version}"))
UNINSTALL = Remedy("install only the wheel you need, after", ("pip", "uninstall", "--yes", "{wheels}"))
FITTING = Remedy("install the required version", ("pip", "install", "{wheel}{specifier}"))
MARK = "onnxruntime/__init__.py"
"""A file in every ONNX Runtime wheel; two wheels in one folder overwrite it."""
HOSTS = frozenset(
    {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu", "onnxruntime-directml"}
)


class Wheel(NamedTuple):
    """A distribution that owns the onnxruntime package."""

    name: str
    version: str
    folder: str
    """The folder of the package."""


def runtime_wheels() -> tuple[Wheel, ...]:
    """Every distribution that owns the onnxruntime package, in the order of Python's path."""
    owners = (
        Wheel(str(found.metadata["Name"]), found.version, str(Path(str(found.locate_file(""))).resolve()))
        for found in metadata.distributions()
        if owns_runtime(found.read_text("RECORD") or "")
    )
    return tuple(dict.fromkeys(owners))


def owns_runtime(record: str) -> bool:
    """Whether a RECORD lists the package itself. Searched as text, because the RECORD of a large package is long."""
    return record.startswith(f"{MARK},") or f"\n{MARK}," in record


def plugin_wheels(providers: Iterable[Provider]) -> dict[str, str]:
    """Versions of the installed plugin packages of these providers, by package name."""
    wheels = (provider.plugin.wheel for provider in providers if provider.plugin)
    return {wheel: version for wheel in wheels if (version := installed_version(wheel))}


def environment_findings(
    providers: Sequence[Provider], *, imported_version: str | None, import_error: str | None
) -> tuple[EnvironmentFinding, ...]:
    """Problems of the installed packages, most serious first.

    `imported_version`: of the ONNX Runtime that Python imports; None if the import fails. `import_error`: its error.
    """
    owners, plugins = runtime_wheels(), plugin_wheels(providers)
    found = [duplicate_runtime(owners)] if len(owners) > 1 else []
    if not owners and imported_version is None:
        evidence = "ONNX Runtime is not installed"
        if plugins:
            named = listing(f"{name} {version}" for name, version in plugins.items())
            evidence = f"{named} needs ONNX Runtime, which is not installed"
        found.append(_finding("not_in_build", evidence, extras.runtime_remedy()))
    elif imported_version is None:
        evidence = f"{_names(owners)} is installed, but cannot be imported: {import_error or 'unknown reason'}"
        found.append(_finding("initialisation_failed", evidence, _reinstall(owners[0])))
    elif len(owners) == 1 and owners[0].version != imported_version:
        evidence = f"{_names(owners)} is installed, but the onnxruntime that Python imports is {imported_version}"
        found.append(_finding("version_mismatch", evidence, _reinstall(owners[0])))
    if owners:
        found += [finding for wheel in plugins for finding in _plugin_mismatches(wheel, owners)]
    for name, (version, needed) in extras.excluded_versions().items():
        evidence = f"{name} {version} is not supported; Partita needs {needed}"
        found.append(_finding("version_mismatch", evidence, FITTING.filled(wheel=name, specifier=needed)))
    return tuple(found)


def _finding(reason: str, evidence: str, remedy: Remedy) -> EnvironmentFinding:
    remedies = remedy_records(remedy)
    return EnvironmentFinding(reason=reason, evidence=evidence, remedy=str(remedy), remedies=remedies)


def _names(owners: Iterable[Wheel]) -> str:
    """`onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1`."""
    return listing(f"{owner.name} {owner.version}" for owner in owners)


def _reinstall(owner: Wheel) -> Remedy:
    """The remedy that reinstalls a wheel."""
    return REINSTALL.filled(wheel=owner.name, version=owner.version)


def duplicate_runtime(owners: Sequence[Wheel]) -> EnvironmentFinding:
    """The finding for several wheels: they overwrite each other in one folder, or the first hides the others."""
    mixed = [owner for owner in owners if owner.folder == owners[0].folder]
    if len(mixed) > 1:
        evidence = f"{_names(mixed)} share the folder {owners[0].folder} and overwrote each other's files"
    else:
        hidden = _names(owner for owner in owners if owner.folder != owners[0].folder)
        evidence = f"{_names(mixed)} in {owners[0].folder} hides {hidden}, later on Python's path"
    return _finding("duplicate_runtime", evidence, duplicate_remedy(owners))


def duplicate_remedy(owners: Sequence[Wheel]) -> Remedy:
    """The remedy that uninstalls all of them, because each has lost files to the others."""
    return UNINSTALL.filled(wheels=tuple(dict.fromkeys(owner.name for owner in owners)))


def _plugin_mismatches(wheel: str, owners: Sequence[Wheel]) -> list[EnvironmentFinding]:
    """Requirements of a plugin package that the installed ONNX Runtime does not meet."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    versions = [owner.version for owner in owners]
    for text in metadata.requires(wheel) or ():
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.name.lower() not in HOSTS or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        if not any(needed.specifier.contains(version, prereleases=True) for version in versions):
            evidence = f"{wheel} {installed_version(wheel)} requires {needed.name}{needed.specifier}"
            evidence += f", and {_names(owners)} is installed"
            remedy = FITTING.filled(wheel=owners[0].name, specifier=needed.specifier)
            found.append(_finding("version_mismatch", evidence, remedy))
    return found
