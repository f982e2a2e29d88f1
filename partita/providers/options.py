"""Provider options and plugin libraries that the user names, and the record of a provider without a file here.

Options are parsed and validated, e.g. `cuda.device_id=1`; those of a provider without a file are passed on unchecked.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import UsageError
from partita.messages import did_you_mean, nearest
from partita.providers.base import Option, Provider

SWITCH = {**dict.fromkeys(("0", "false", "no", "off"), 0), **dict.fromkeys(("1", "true", "yes", "on"), 1)}
"""Text of a `bool` -> index in `Option.off_on`."""
INTEGER = re.compile(r"[+-]?\d{1,300}")


def parse_options(
    given: Mapping[str, Mapping[str, object]], chain: Sequence[Provider], argument: str = "provider_options"
) -> dict[str, dict[str, str]]:
    """Validated options: provider name -> option -> value in ONNX Runtime's spelling. `given` may use aliases.

    Raises UsageError for a provider outside the chain, an unknown or duplicate option, and an invalid value.
    """
    by_name = {name.lower(): provider for provider in chain for name in provider.names()}
    found: dict[str, dict[str, str]] = {}
    for word, options in given.items():
        if not isinstance(options, Mapping):
            raise UsageError(f"`{argument}`: the options of {word} are {options!r}; give a dict")
        for name, value in options.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            written = f"`{argument}={word}.{name}={text}`"
            provider = by_name.get(word.lower())
            if provider is None:
                there = ", ".join(entry.name for entry in chain)
                near = did_you_mean(nearest(word, by_name))
                raise UsageError(f"{written}: {word!r} is not in the provider chain; {near}the chain is: {there}")
            option = _find_option(written, provider, name)
            if option.name in found.setdefault(provider.name, {}):
                raise UsageError(f"{written}: {provider.name}.{option.name} is given twice; give it once")
            found[provider.name][option.name] = _check_value(written, option, text)
    return found


def _find_option(written: str, provider: Provider, name: str) -> Option:
    """The option of a name, ignoring case; a text if the options of the provider are unknown. Raises UsageError."""
    if provider.any_option:
        return Option(name, "text", "", "")
    by_name = {option.name.lower(): option for option in provider.options}
    if name.lower() in by_name:
        return by_name[name.lower()]
    if not by_name:
        raise UsageError(f"{written}: {provider.name} has no options")
    near = did_you_mean(nearest(name, (option.name for option in provider.options)))
    listed = ", ".join(f"{option.name} ({'|'.join(option.choices) or option.kind})" for option in provider.options)
    raise UsageError(f"{written}: {provider.name} has no option {name!r}; {near}its options are: {listed}")


def _check_value(written: str, option: Option, value: str) -> str:
    """The value in ONNX Runtime's spelling. Raises UsageError for an invalid value."""
    word, found = value.lower(), None
    match option.kind:
        case "int":
            least = -math.inf if option.minimum is None else option.minimum
            expected = "an integer" if option.minimum is None else f"an integer of at least {option.minimum}"
            found = str(int(value)) if INTEGER.fullmatch(value) and int(value) >= least else None
        case "bool":
            expected, found = "0 or 1", option.off_on[SWITCH[word]] if word in SWITCH else None
        case "choice":
            expected = f"one of {', '.join(option.choices)}"
            found = next((choice for choice in option.choices if choice.lower() == word), None)
        case "path":
            expected, found = "a path", value or None
        case _:
            return value
    if found is None:
        default = f" (default {option.default})" if option.default else ""
        raise UsageError(f"{written}: {option.name} takes {expected}{default}: {option.meaning}")
    return found


def unchecked_notes(options: Mapping[str, Mapping[str, str]], chain: Sequence[Provider]) -> tuple[str, ...]:
    """One sentence per provider with options that were passed on unchecked."""
    given = {provider.name: options.get(provider.name, {}) for provider in chain if provider.any_option}
    listed = {name: ", ".join(sorted(values)) for name, values in given.items() if values}
    return tuple(f"options of {name} are passed on unchecked: {names}" for name, names in listed.items())


# --- other providers --------------------------------------------------------------------------------------------------

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


def _check_library(path: Path, argument: str) -> Path:
    """The absolute path of a shared library. Raises UsageError for other files."""
    problem = "is not a file" if path.exists() else "does not exist"
    if path.is_file():
        problem = f"is not a provider plugin: it has no {ENTRY_POINT.decode()}"
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(ENTRY_POINT) >= 0:  # checked here because loading it runs its code
                    return path.resolve()
        except OSError as error:
            problem = f"cannot be read ({error.strerror or type(error).__name__}): check its permissions"
        except ValueError:  # an empty file cannot be mapped
            pass
    raise UsageError(f"`{argument}`: {path} {problem}; give the path of the plugin's library file")
