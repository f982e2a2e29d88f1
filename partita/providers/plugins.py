"""Provider plugins that are installed as Python packages: their library path and default options.

Imports the plugin's Python module, which does not load the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from partita.providers.base import Plugin, Provider
from partita.providers.start import Failure, failure


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """An installed wheel with a provider library."""

    wheel: str
    version: str
    library: Path | None
    """None if the package does not provide its path."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The user's options and the package's defaults, e.g. the path of its backend."""
    failure: Failure | None = None
    """Why it cannot be used with these options."""


def _merged(plugin: Plugin, answered: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The user's options with the package's defaults for the others."""
    paths = {name for name, _ in plugin.path_options} if any(name in given for name in plugin.yields_to) else set()
    return {**{name: value for name, value in answered.items() if name not in paths}, **given}


def installed_version(wheel: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return None


def find_plugin(provider: Provider, given: Mapping[str, str]) -> InstalledPlugin | None:
    """The installed plugin package of a provider; None if there is none. `given`: the user's options."""
    plugin = provider.plugin
    version = installed_version(plugin.wheel) if plugin else None
    if plugin is None or version is None:
        return None
    try:
        library, options = _query_module(plugin)
    except Exception as error:  # noqa: BLE001 - the plugin's module may raise anything
        reason = f"{plugin.wheel} {version} is installed, but cannot be used: {type(error).__name__}: {error}"
        return InstalledPlugin(plugin.wheel, version, None, failure=failure(provider, "initialisation_failed", reason))
    if not library.is_file():
        reason = f"{plugin.wheel} {version} names {library}, which does not exist"
        return InstalledPlugin(
            plugin.wheel, version, None, failure=failure(provider, "library_missing", reason, library.name)
        )
    ignored = [name for name in given if name in plugin.ignores]
    if ignored:
        reason = f"{plugin.wheel} {version} ignores {', '.join(ignored)}"
        return InstalledPlugin(plugin.wheel, version, library, failure=failure(provider, "option_rejected", reason))
    return InstalledPlugin(plugin.wheel, version, library, _merged(plugin, options, given))


def _query_module(plugin: Plugin) -> tuple[Path, dict[str, str]]:
    """Library path and path options from the plugin's module."""
    module = importlib.import_module(plugin.module)
    options = {option: str(getattr(module, function)()) for option, function in plugin.path_options}
    return Path(str(getattr(module, plugin.library_function)())), {**dict(plugin.default_options), **options}
