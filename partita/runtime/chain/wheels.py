"""Python packages with ONNX Runtime and its plugins, and whether they fit together, by their metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from partita import extras
from partita.machine.records import EnvironmentFinding
from partita.observations.records import remedy_records
from partita.observations.text_format import listing
from partita.providers.base import Provider
from partita.providers.plugins import installed_version
from partita.remedies import Remedy

REINSTALL = Remedy("put its files back", ("pip", "install", "--force-reinstall", "{wheel}=={version}"))
UNINSTALL = Remedy("install only the one you want, after", ("pip", "uninstall", "--yes", "{wheels}"))
FITTING = Remedy("install the one that it needs", ("pip", "install", "{wheel}{specifier}"))
MARK = "onnxruntime/__init__.py"
"""The file that every ONNX Runtime wheel installs, and that two of them overwrite for each other."""
HOSTS = frozenset(
    {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu", "onnxruntime-directml"}
)


class Wheel(NamedTuple):
    """A distribution that owns the onnxruntime package."""

    name: str
    version: str
    folder: str
    """Where it installed the package."""


def runtime_wheels() -> tuple[Wheel, ...]:
    """Every distribution that owns the onnxruntime package, in the order in which Python looks for it."""
    owners = (
        Wheel(str(found.metadata["Name"]), found.version, str(Path(str(found.locate_file(""))).resolve()))
        for found in metadata.distributions()
        if owns_runtime(found.read_text("RECORD") or "")
    )
    return tuple(dict.fromkeys(owners))


def owns_runtime(record: str) -> bool:
    """Whether a RECORD lists the package itself. Looked for as text: the records of large packages are long."""
    return record.startswith(f"{MARK},") or f"\n{MARK}," in record


def plugin_wheels(providers: Iterable[Provider]) -> dict[str, str]:
    """Version of every installed plugin package of these providers, by its name."""
    wheels = (provider.plugin.wheel for provider in providers if provider.plugin)
    return {wheel: version for wheel in wheels if (version := installed_version(wheel))}


def environment_findings(
    providers: Sequence[Provider], *, imported_version: str | None, import_error: str | None
) -> tuple[EnvironmentFinding, ...]:
    """Problems of the packages, most serious first.

    `imported_version`: of the ONNX Runtime that Python imports, None when it cannot. `import_error`: then why not.
    """
    owners, plugins = runtime_wheels(), plugin_wheels(providers)
    found = [duplicate_runtime(owners)] if len(owners) > 1 else []
    if not owners and imported_version is None:
        needing = f"{_shown(plugins.items())} needs an ONNX Runtime, and none is installed"
        evidence = needing if plugins else "no ONNX Runtime is installed"
        found.append(_finding("not_in_build", evidence, extras.runtime_remedy()))
    elif imported_version is None:
        evidence = f"{_names(owners)} is installed, but cannot be imported: {import_error or 'no reason known'}"
        found.append(_finding("initialisation_failed", evidence, _reinstall(owners[0])))
    elif len(owners) == 1 and owners[0].version != imported_version:
        evidence = f"{_names(owners)} is installed, but the onnxruntime that Python imports is {imported_version}"
        found.append(_finding("version_mismatch", evidence, _reinstall(owners[0])))
    if owners:
        found += [finding for wheel in plugins for finding in _plugin_mismatches(wheel, owners)]
    return tuple(found)


def _finding(reason: str, evidence: str, remedy: Remedy) -> EnvironmentFinding:
    return EnvironmentFinding(reason=reason, evidence=evidence, **said(remedy))


def _shown(owners: Iterable[tuple[str, str]]) -> str:
    """`onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1`."""
    return listing(f"{name} {version}" for name, version in owners)


def _names(owners: Iterable[Wheel]) -> str:
    """Names and versions of wheels."""
    return _shown((owner.name, owner.version) for owner in owners)


def _reinstall(owner: Wheel) -> Remedy:
    """How to put the files of a wheel back."""
    return REINSTALL.filled(wheel=owner.name, version=owner.version)


def said(remedy: Remedy) -> dict[str, Any]:
    """The fields of a remedy in a record."""
    return {"remedy": str(remedy), "remedies": remedy_records(remedy)}


def duplicate_runtime(owners: Sequence[Wheel]) -> EnvironmentFinding:
    """Several wheels: in one folder they overwrite each other's files, in several the first one hides the others."""
    mixed = [owner for owner in owners if owner.folder == owners[0].folder]
    if len(mixed) > 1:
        evidence = f"{_names(mixed)} share one folder, {owners[0].folder}, and overwrote each other's files"
    else:
        hidden = _names(owner for owner in owners if owner.folder != owners[0].folder)
        evidence = f"{_names(mixed)} in {owners[0].folder} hides {hidden} elsewhere on Python's path"
    return _finding("duplicate_runtime", evidence, duplicate_remedy(owners))


def duplicate_remedy(owners: Sequence[Wheel]) -> Remedy:
    """Uninstall all of them: each has lost files to the others."""
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
