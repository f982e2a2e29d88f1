"""Providers without a file in this folder: other providers of ONNX Runtime, and plugin libraries given by path.

Their options are passed on unchecked.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import UsageError
from partita.providers.base import Provider

SUFFIX = "ExecutionProvider"
ENTRY_POINT = b"CreateEpFactories"
"""The function that ONNX Runtime calls in a plugin library."""


def generic_provider(ort_name: str, library: Path | None = None) -> Provider:
    """The record of an undescribed provider, by ONNX Runtime's name or the name of its library."""
    return Provider(
        name=ort_name.removesuffix(SUFFIX).lower() or ort_name.lower(),
        ort_name=ort_name,
        any_option=True,
        library=library,
    )


def split_libraries(texts: Sequence[str], argument: str = "provider_libraries") -> dict[str, str]:
    """Parse `NAME=PATH` texts to name -> path. Raises UsageError for other forms and duplicate names."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        name = name.strip()
        if not separator or not name or not path:
            raise UsageError(f"`{argument}={text}`: write NAME=PATH, e.g. webgpu=/opt/lib/libwebgpu_ep.so")
        if name in found:
            raise UsageError(f"`{argument}={text}`: {name} is given twice; give each library one name")
        found[name] = path
    return found


def parse_libraries(
    given: Mapping[str, str | os.PathLike[str]], known: Mapping[str, Provider], argument: str = "provider_libraries"
) -> tuple[Provider, ...]:
    """The providers of plugin libraries. One with the name of a described provider has its options and log patterns.

    `known`: described providers by lower-case name. Raises UsageError for a file that is missing or not a shared
    library, and for two names of one provider.
    """
    found: dict[str, Provider] = {}
    for name, path in given.items():
        text = f"{name}={os.fspath(path)}"
        if not name.replace("_", "").replace("-", "").isalnum():
            raise UsageError(f"`{argument}={text}`: a name may contain only letters, digits, - and _")
        library, described = _check_library(Path(path).expanduser(), argument), known.get(name.lower())
        provider = replace(described, library=library) if described else generic_provider(name, library)
        if provider.name in found:
            raise UsageError(f"`{argument}={text}`: {provider.name} is given twice; give each library one name")
        found[provider.name] = provider
    return tuple(found.values())


def _check_library(path: Path, argument: str = "provider_libraries") -> Path:
    """The absolute path of a shared library. Raises UsageError for other files."""
    if path.exists() and not path.is_file():
        raise UsageError(f"`{argument}`: {path} is not a file; give the library file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            is_plugin = content.find(ENTRY_POINT) >= 0  # checked here because loading it runs its code
    except FileNotFoundError as error:
        raise UsageError(f"`{argument}`: {path} does not exist; give the path of the library file") from error
    except ValueError:  # an empty file cannot be mapped
        is_plugin = False
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"`{argument}`: {path} cannot be read: {reason}; check its permissions") from error
    if not is_plugin:
        raise UsageError(
            f"`{argument}`: {path} is not a provider plugin: it has no {ENTRY_POINT.decode()}; give the plugin's "
            "library"
        )
    return path.resolve()
