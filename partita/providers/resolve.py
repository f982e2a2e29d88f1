"""From what the user wrote to what this machine has: names to provider records, records to resolutions.

Knows which provider files lie in this folder, and nothing about any one provider. Does not import ONNX Runtime: the
caller says which providers its build contains.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from partita.errors import UsageError
from partita.messages import did_you_mean, nearest
from partita.observations.codes import ReasonCode
from partita.providers.base import Option, Provider
from partita.providers.generic import SUFFIX, generic_provider, other_provider
from partita.providers.plugins import find_plugin
from partita.providers.start import Failure, failure
from partita.remedies import Remedy

ORT_NAME = re.compile(rf"[A-Za-z0-9_]+{SUFFIX}")
MEANT = Remedy("as in", options=("--{option}", "{chain}"))
WHICH = Remedy("see which of them run here", ("partita", "providers"))
INSTALL = Remedy("in an environment without another ONNX Runtime", ("pip", "install", "{wheel}"))
PACKAGE = __name__.rpartition(".")[0]
NEAR = 0.8
"""How alike a name must be to one of ours to be taken for a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What became of one provider of the chain on this machine."""

    provider: Provider
    status: Literal["active", "unavailable"]
    reason: ReasonCode | None = None
    """A provider-level one, or `subgraph_rejected` or `dynamic_shape` over one graph; None when active."""
    evidence: str | None = None
    remedy: Remedy | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider options as ONNX Runtime takes them: the user's, and those that a plugin package answers itself."""
    library: Path | None = None
    """Plugin library to register under `provider.ort_name` before a session is opened; None: nothing to register."""
    crashed: bool = False
    """Its native code ended a process over the model, so it was left out of this one."""

    @property
    def provider_options(self) -> dict[str, str]:
        """The options that the provider itself takes."""
        ours = {option.name for option in self.provider.options if option.ours}
        return {name: value for name, value in self.options.items() if name not in {*self._of_session(), *ours}}

    @property
    def session_config(self) -> dict[str, str]:
        """The options that ONNX Runtime takes for the provider, as entries of the session configuration."""
        listed = self._of_session().items()
        return {
            option.session_key: f"{self.options[name]}{option.session_suffix}"
            for name, option in listed
            if name in self.options
        }

    @property
    def captures(self) -> bool:
        """It is asked to record a run of a graph and to replay it."""
        return bool(self.provider.capture_option) and self.options.get(self.provider.capture_option) == "1"

    def uncaptured(self) -> Resolution:
        """The same without being asked that."""
        kept = {name: value for name, value in self.options.items() if name != self.provider.capture_option}
        return replace(self, options=kept) if self.captures else self

    @property
    def budget(self) -> str:
        """The memory budget that the user gave the provider, as it was written; empty when there is none."""
        name = self.provider.budget_option
        return f"{self.provider.name}.{name}={self.options[name]}" if name and name in self.options else ""

    def _of_session(self) -> dict[str, Option]:
        return {option.name: option for option in self.provider.options if option.session_key}


@cache
def known_providers() -> dict[str, Provider]:
    """Every provider that has a file in this folder, by name, in alphabetical order.

    A module counts when it exposes `PROVIDER`. Raises ValueError when a file is not called after its provider, or two
    providers claim the same name: both are mistakes in a provider file.
    """
    found: dict[str, Provider] = {}
    for info in sorted(pkgutil.iter_modules(sys.modules[PACKAGE].__path__), key=lambda info: info.name):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{PACKAGE}.{info.name}")
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
        for name in dict.fromkeys(map(str.lower, provider.names())):
            if name in by_name:
                raise ValueError(f"{name!r} is a name of both {by_name[name].name} and {provider.name}")
            by_name[name] = provider
    return by_name


def all_names(extra: Sequence[Provider] = ()) -> dict[str, Provider]:
    """Every name a user may write, with `extra` in place of known providers of the same name."""
    return {**names_to_providers(tuple(known_providers().values())), **names_to_providers(tuple(extra))}


def parse_chain(text: str, extra: Sequence[Provider] = (), *, argument: str = "providers") -> tuple[Provider, ...]:
    """Read a provider chain such as `cuda,cpu`: names, aliases or ONNX Runtime's names, in order of preference.

    `extra` are providers that the user brought with --provider-library, `argument` is what has the chain. Case
    does not matter. A name that has no file here but the form of ONNX Runtime's names, e.g. XnnpackExecutionProvider,
    is taken as it is. Raises UsageError when the chain is empty, or names an unknown provider or the same one twice.
    """
    by_name = all_names(extra)
    listed = tuple(dict.fromkeys((*known_providers(), *(provider.name for provider in extra))))
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise UsageError(f"`{argument}` is empty; name at least one of: {', '.join(listed)}")
    chain: list[Provider] = []
    for word in words:
        provider = by_name.get(word.lower()) or _other_provider(word, by_name.values())
        if provider is None:
            raise _unknown_provider(word, words, by_name, listed, argument)
        if provider.ort_name in {entry.ort_name for entry in chain}:
            raise UsageError(f"`{argument}={text}`: {provider.name} is in the chain twice; name each provider once")
        chain.append(provider)
    return tuple(chain)


def _other_provider(word: str, known: Collection[Provider]) -> Provider | None:
    """A provider that has no file here, by a name that ONNX Runtime has or might have; None when it looks like one of
    ours written wrongly.
    """
    if (listed := other_provider(word)) is not None:
        return listed
    if not ORT_NAME.fullmatch(word):
        return None
    ours = {provider.ort_name.removesuffix(SUFFIX).lower() for provider in known}
    if difflib.get_close_matches(word.removesuffix(SUFFIX).lower(), ours, n=1, cutoff=NEAR):
        return None
    return generic_provider(word)


def _unknown_provider(
    word: str, words: Sequence[str], by_name: Mapping[str, Provider], listed: Collection[str], argument: str
) -> UsageError:
    """The error for an unknown name, with the listed ones that it may stand for. `words`: the whole chain."""
    if not word:
        return UsageError(f"`{argument}` has an empty place between commas; name providers out of: {', '.join(listed)}")
    said = f"`{argument}`: unknown provider {word!r}"
    by_rank = sorted(by_name.values(), key=lambda provider: -provider.rank)
    near = [provider.name for provider in by_rank if word.lower() in provider.suggested_for]
    near = list(dict.fromkeys(near or [by_name[name].name for name in nearest(word, by_name)]))
    said = f"{said}; {did_you_mean(near)}known providers: {', '.join(listed)}"
    if not near:
        return UsageError(said, remedy=WHICH)
    if argument not in ("providers", "target"):  # others hold more than a chain
        return UsageError(said)
    chain = ",".join(dict.fromkeys(near[0] if entry == word else entry for entry in words))
    return UsageError(said, remedy=MEANT.filled(option=argument.removesuffix("s"), chain=chain))


def resolve(
    chain: Sequence[Provider],
    available_ort_names: Collection[str],
    options: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[Resolution, ...]:
    """Say of each provider of the chain where it is to come from, or why it cannot.

    `available_ort_names` are the names that ONNX Runtime lists as compiled in; `options` come from `parse_options`. A
    provider that is there can still fail to start; opening a session tells.
    """
    given = options or {}
    return tuple(resolve_one(provider, available_ort_names, given.get(provider.name, {})) for provider in chain)


def resolve_one(
    provider: Provider, available_ort_names: Collection[str], options: Mapping[str, str] | None = None
) -> Resolution:
    """Resolution of one provider: a library that the user gave, ONNX Runtime itself, or an installed plugin package."""
    given = dict(options or {})
    if provider.library is not None:
        # Its package may be installed all the same, and knows the paths that the provider needs.
        package = find_plugin(provider, given)
        known = package.options if package is not None and package.failure is None else given
        return Resolution(provider, "active", options=known, library=provider.library)
    if provider.ort_name in available_ort_names:
        return Resolution(provider, "active", options=given)
    plugin = find_plugin(provider, given)
    if plugin is None:
        why = _absent(provider, available_ort_names)
    elif plugin.failure is not None:
        why = plugin.failure
    else:
        return Resolution(provider, "active", options=plugin.options, library=plugin.library)
    return Resolution(provider, "unavailable", why.reason, why.evidence, why.remedy, given)


def _absent(provider: Provider, available_ort_names: Collection[str]) -> Failure:
    """Why a provider is not in this build."""
    there = ", ".join(available_ort_names) or "no provider"
    why = failure(provider, "not_in_build", f"the installed ONNX Runtime contains {there}")
    if provider.wheels and not provider.remedy("not_in_build"):
        return replace(why, remedy=INSTALL.filled(wheel=provider.wheels[0]))
    return why
