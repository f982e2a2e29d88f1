"""From what the user wrote to what this machine has: names to provider records, records to resolutions.

Knows which provider files lie in this folder, and nothing about any one provider. Does not import ONNX Runtime: the
caller says which providers its build contains.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Literal

import partita.providers
from partita.errors import UsageError
from partita.providers.base import Provider

DEFAULT_CHAIN = "cpu"
"""The chain when the user names none."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What became of one provider of the chain on this machine."""

    provider: Provider
    status: Literal["active", "unavailable"]
    reason: str | None = None
    """A provider-level reason code; None when active."""
    evidence: str | None = None
    remedy: str | None = None


@cache
def known_providers() -> dict[str, Provider]:
    """Every provider that has a file in this folder, by name, in alphabetical order.

    A module counts when it exposes `PROVIDER`. Raises ValueError when a file is not called after its provider, or two
    providers claim the same name: both are mistakes in a provider file.
    """
    found: dict[str, Provider] = {}
    for info in sorted(pkgutil.iter_modules(partita.providers.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{partita.providers.__name__}.{info.name}")
        provider = getattr(module, "PROVIDER", None)
        if not isinstance(provider, Provider):
            continue
        if provider.name != info.name:
            raise ValueError(f"providers/{info.name}.py describes {provider.name!r}; name the file after its provider")
        found[provider.name] = provider
    names_to_providers(tuple(found.values()))
    return found


def names_to_providers(providers: Collection[Provider]) -> dict[str, Provider]:
    """Every name a user may write, in lower case, to its provider. Raises ValueError when two providers share one."""
    by_name: dict[str, Provider] = {}
    for provider in providers:
        for name in map(str.lower, provider.names()):
            if name in by_name:
                raise ValueError(f"{name!r} is a name of both {by_name[name].name} and {provider.name}")
            by_name[name] = provider
    return by_name


def parse_chain(text: str) -> tuple[Provider, ...]:
    """Read a provider chain such as `cuda,cpu`: names, aliases or ONNX Runtime's names, in any case, most wanted first.

    Raises UsageError when the chain is empty, or names an unknown provider or the same one twice.
    """
    known = known_providers()
    by_name = names_to_providers(tuple(known.values()))
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise UsageError(f"--provider is empty; name at least one of: {', '.join(known)}")
    chain: list[Provider] = []
    for word in words:
        provider = by_name.get(word.lower())
        if provider is None:
            raise UsageError(unknown_provider(word, tuple(by_name), tuple(known)))
        if provider in chain:
            raise UsageError(f"--provider {text}: {provider.name} is in the chain twice; name each provider once")
        chain.append(provider)
    return tuple(chain)


def unknown_provider(word: str, names: Collection[str], listed: Collection[str]) -> str:
    """The message for a name that nobody answers to, with the nearest one that exists."""
    if not word:
        return f"--provider has an empty place between commas; name providers out of: {', '.join(listed)}"
    near = difflib.get_close_matches(word.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"--provider: unknown provider {word!r}; {hint}known providers: {', '.join(listed)}"


def resolve(chain: tuple[Provider, ...], available_ort_names: Collection[str]) -> tuple[Resolution, ...]:
    """Say of each provider of the chain whether the installed ONNX Runtime contains it.

    `available_ort_names` are the names that ONNX Runtime lists as compiled in. A provider that is compiled in can still
    fail to start; opening a session tells.
    """
    return tuple(resolve_one(provider, available_ort_names) for provider in chain)


def resolve_one(provider: Provider, available_ort_names: Collection[str]) -> Resolution:
    """Resolution of one provider."""
    if provider.ort_name in available_ort_names:
        return Resolution(provider, "active")
    return Resolution(
        provider,
        "unavailable",
        reason="not_in_build",
        evidence=f"the installed ONNX Runtime contains {', '.join(available_ort_names) or 'no provider'}",
        remedy=provider.remedy("not_in_build") or f"install one of: {', '.join(provider.wheels)}",
    )
