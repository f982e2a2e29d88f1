"""Provider plugins that are installed as Python packages: their library path and default options.

Imports the plugin's Python module, which does not load the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from partita.providers.base import Plugin, Provider
from partita.providers.start import Failure, failure


def installed_version(wheel: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return None


def find_plugin(provider: Provider, given: Mapping[str, str]) -> tuple[Path, dict[str, str]] | Failure | None:
    """Library and options of the installed plugin package of a provider, or why it cannot be used; None without one.

    `given`: the user's options, to which the package's defaults are added, e.g. the path of its backend.
    """
    plugin = provider.plugin
    version = installed_version(plugin.wheel) if plugin else None
    if plugin is None or version is None:
        return None
    wheel = f"{plugin.wheel} {version}"
    try:
        library, options = _query_module(plugin)
    except Exception as error:  # noqa: BLE001 - the plugin's module may raise anything
        evidence = f"{wheel} is installed, but cannot be used: {type(error).__name__}: {error}"
        return failure(provider, "initialisation_failed", evidence)
    if not library.is_file():
        return failure(provider, "library_missing", f"{wheel} names {library}, which does not exist", library.name)
    ignored = [name for name in given if name in plugin.ignores]
    if ignored:
        return failure(provider, "option_rejected", f"{wheel} ignores {', '.join(ignored)}")
    replaced = {name for name, _ in plugin.path_options} if given.keys() & set(plugin.yields_to) else set()
    return library, {**{name: value for name, value in options.items() if name not in replaced}, **given}


def _query_module(plugin: Plugin) -> tuple[Path, dict[str, str]]:
    """Library path and path options from the plugin's module."""
    module = importlib.import_module(plugin.module)
    options = {option: str(getattr(module, function)()) for option, function in plugin.path_options}
    return Path(str(getattr(module, plugin.library_function)())), {**dict(plugin.default_options), **options}
