"""Provider names to records, records to their availability on this machine, and why a provider did not start.

Does not import ONNX Runtime. Patterns of messages have the wording of ONNX Runtime 1.31.1 and cudaGetErrorString.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from partita.errors import UsageError
from partita.messages import did_you_mean, nearest
from partita.observations.codes import ReasonCode
from partita.observations.native_text import cut, without_signatures
from partita.observations.patterns import LogPattern
from partita.observations.text_format import clean
from partita.providers.base import OPTIONS, OTHER_RUNTIME, Provider
from partita.providers.options import SUFFIX, generic_provider
from partita.remedies import Remedy, any_of

ORT_NAME = re.compile(rf"[A-Za-z0-9_]+{SUFFIX}")
EXAMPLE_CHAIN = Remedy("for example", options=("--{option}", "{chain}"))
WHICH = Remedy("list the providers that run here", ("partita", "providers"))
INSTALL = Remedy("in an environment without another ONNX Runtime", ("pip", "install", "{wheel}"))
INSTALL_PLUGIN = Remedy("next to onnxruntime", ("pip", "install", "{wheel}"))
PACKAGE = __name__.rpartition(".")[0]
MISSPELT_SIMILARITY = 0.8
"""Similarity above which an unknown name counts as a misspelt provider."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Availability of one provider of the chain on this machine."""

    provider: Provider
    status: Literal["active", "unavailable"]
    reason: ReasonCode | None = None
    """A provider-level reason, or `subgraph_rejected` or `dynamic_shape` for one graph; None if active."""
    evidence: str | None = None
    remedy: Remedy | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider options in ONNX Runtime's spelling: the user's and the defaults of a plugin package."""
    library: Path | None = None
    """Plugin library to register under `provider.ort_name` before a session is opened; None if there is none."""
    crashed: bool = False
    """It crashed another process on this model, so it is not used."""

    @property
    def provider_options(self) -> dict[str, str]:
        """The options that are passed to the provider."""
        others = {option.name for option in self.provider.options if option.session_key or option.partita_option}
        return {name: value for name, value in self.options.items() if name not in others}

    @property
    def session_config(self) -> dict[str, str]:
        """The options that are entries of the session configuration."""
        listed = [each for each in self.provider.options if each.session_key and each.name in self.options]
        return {each.session_key: f"{self.options[each.name]}{each.session_suffix}" for each in listed}

    @property
    def captures(self) -> bool:
        """Whether graph capture is on."""
        return self.options.get(self.provider.capture_option) == "1"

    def uncaptured(self) -> Resolution:
        """A copy without graph capture."""
        options = {name: value for name, value in self.options.items() if name != self.provider.capture_option}
        return replace(self, options=options) if self.captures else self

    @property
    def budget(self) -> str:
        """The user's memory budget as written; empty if there is none."""
        name = self.provider.budget_option
        return f"{self.provider.name}.{name}={self.options[name]}" if name in self.options else ""

    @property
    def cache_folder(self) -> str:
        """The user's folder of compiled graphs; empty if there is none."""
        return self.options.get(self.provider.cache_option, "")


@cache
def known_providers() -> dict[str, Provider]:
    """The providers of this folder's files by name, in alphabetical order."""
    names = sorted(info.name for info in pkgutil.iter_modules(sys.modules[PACKAGE].__path__) if not info.ispkg)
    modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    found = [module.PROVIDER for module in modules if hasattr(module, "PROVIDER")]
    return {provider.name: provider for provider in found}


def all_names(extra: Sequence[Provider] = ()) -> dict[str, Provider]:
    """Lower-case names and aliases of all providers; `extra` replaces providers of the same name."""
    providers = (*known_providers().values(), *extra)
    return {name.lower(): provider for provider in providers for name in provider.names()}


def parse_chain(text: str, extra: Sequence[Provider] = (), *, argument: str = "providers") -> tuple[Provider, ...]:
    """Parse a provider chain such as `cuda,cpu`: names, aliases or ONNX Runtime's names, ignoring case.

    `extra`: providers of --provider-library. `argument`: name of the option. Other names of the form
    XnnpackExecutionProvider are accepted. Raises UsageError for an empty chain, an unknown and a repeated provider.
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
    """An undescribed provider with a name in ONNX Runtime's form; None for a misspelt described provider."""
    if not ORT_NAME.fullmatch(word):
        return None
    ours = {provider.ort_name.removesuffix(SUFFIX).lower() for provider in known}
    if difflib.get_close_matches(word.removesuffix(SUFFIX).lower(), ours, n=1, cutoff=MISSPELT_SIMILARITY):
        return None
    return generic_provider(word)


def _unknown_provider(
    word: str, words: Sequence[str], by_name: Mapping[str, Provider], listed: Collection[str], argument: str
) -> UsageError:
    """The error for an unknown name, with suggestions. `words`: the whole chain."""
    if not word:
        return UsageError(f"`{argument}` has an empty item; choose providers from: {', '.join(listed)}")
    problem = f"`{argument}`: unknown provider {word!r}"
    by_rank = sorted(by_name.values(), key=lambda provider: -provider.rank)
    near = [provider.name for provider in by_rank if word.lower() in provider.suggested_for]
    near = list(dict.fromkeys(near or [by_name[name].name for name in nearest(word, by_name)]))
    problem = f"{problem}; {did_you_mean(near)}known providers: {', '.join(listed)}"
    if not near:
        return UsageError(problem, remedy=WHICH)
    if argument not in ("providers", "target"):  # other arguments contain more than a chain
        return UsageError(problem)
    chain = ",".join(dict.fromkeys(near[0] if entry == word else entry for entry in words))
    return UsageError(problem, remedy=EXAMPLE_CHAIN.filled(option=argument.removesuffix("s"), chain=chain))


def resolve(
    chain: Sequence[Provider],
    available_ort_names: Collection[str],
    options: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[Resolution, ...]:
    """The availability of each provider of the chain. An available provider may still fail to start.

    `available_ort_names`: built-in providers of ONNX Runtime. `options`: from `parse_options`.
    """
    given = options or {}
    return tuple(resolve_one(provider, available_ort_names, given.get(provider.name, {})) for provider in chain)


def resolve_one(
    provider: Provider, available_ort_names: Collection[str], options: Mapping[str, str] | None = None
) -> Resolution:
    """Availability of one provider: the user's library, a built-in provider, or an installed plugin package."""
    given = dict(options or {})
    if provider.library is None and provider.ort_name in available_ort_names:
        return Resolution(provider, "active", options=given)
    plugin = _find_plugin(provider, given)
    if provider.library is not None:
        # An installed plugin package still supplies default paths.
        known = plugin.options if plugin is not None else given
        return Resolution(provider, "active", options=known, library=provider.library)
    there = ", ".join(available_ort_names) or "no provider"
    return plugin or _unusable(provider, given, "not_in_build", f"the installed ONNX Runtime contains {there}")


def _unusable(provider: Provider, options: Mapping[str, str], reason: ReasonCode, evidence: str) -> Resolution:
    """A provider that cannot be used."""
    cause = failure(provider, reason, evidence)
    return Resolution(provider, "unavailable", cause.reason, cause.evidence, cause.remedy, options)


def installed_version(wheel: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return None


def _find_plugin(provider: Provider, given: Mapping[str, str]) -> Resolution | None:
    """Availability of the installed plugin package of a provider; None without one.

    `given`: the user's options, to which the package's defaults are added, e.g. the path of its backend.
    """
    plugin = provider.plugin
    version = installed_version(plugin.wheel) if plugin else None
    if plugin is None or version is None:
        return None
    wheel = f"{plugin.wheel} {version}"
    try:
        module = importlib.import_module(plugin.module)
        paths = {option: str(getattr(module, function)()) for option, function in plugin.path_options}
        library = Path(str(getattr(module, plugin.library_function)()))
    except Exception as error:  # noqa: BLE001 - the plugin's module may raise anything
        evidence = f"{wheel} is installed, but cannot be used: {type(error).__name__}: {error}"
        return _unusable(provider, given, "initialisation_failed", evidence)
    if not library.is_file():
        return _unusable(provider, given, "library_missing", f"{wheel} names {library}, which does not exist")
    if ignored := [name for name in given if name in plugin.ignores]:
        return _unusable(provider, given, "option_rejected", f"{wheel} ignores {', '.join(ignored)}")
    defaults = dict(plugin.default_options) | ({} if given.keys() & set(plugin.yields_to) else paths)
    return Resolution(provider, "active", options={**defaults, **given}, library=library)


# --- why a provider did not start -------------------------------------------------------------------------------------

LONGEST = 300
"""Maximum characters of evidence."""
WHATEVER_ELSE = Remedy("list its requirements", ("partita", "providers"))
REMEDIES: dict[ReasonCode, Remedy] = {
    "not_in_build": Remedy("install an ONNX Runtime that contains it"),
    "device_missing": Remedy("run it on a machine with a supported device"),
    "version_mismatch": OTHER_RUNTIME,
    "option_rejected": OPTIONS,
}
"""Default remedies by reason; `WHATEVER_ELSE` for other reasons."""
DROPPED = LogPattern(
    "version_mismatch",
    r"(?P<provider>\w+) cannot be used with this model due to its ONNX opset not being supported",
)
"""The only line that is logged when a provider with another layout loses every node, because ONNX Runtime's layout
transformer does not support the opset."""

START_PATTERNS: tuple[LogPattern, ...] = (
    # version_mismatch first: its lines also match library_missing.
    LogPattern("version_mismatch", r"(?P<why>\S+: undefined symbol: [^\s,]+)"),
    LogPattern("version_mismatch", r"(?P<why>version `[^']+' not found \(required by [^)]+\))"),
    LogPattern("version_mismatch", r"(?P<why>The requested API version \[\d+\] is not available.*)"),
    LogPattern("version_mismatch", r"(?P<why>ORT runtime version \"[^\"]+\" is below the minimum required .*)"),
    LogPattern("version_mismatch", r"(?P<why>CUDA driver version is insufficient for CUDA runtime version)"),
    LogPattern("library_missing", r"(?P<why>\S+: cannot open shared object file: No such file or directory)"),
    LogPattern("library_missing", r"(?P<why>Library not loaded: \S+)"),
    LogPattern("library_missing", r"LoadLibrary failed with error 126(?P<why>.*)"),
    LogPattern("library_missing", r"(?P<why>Failed to load library .*)"),
    LogPattern("option_rejected", r"(?P<why>Unknown provider option: .*)"),
    LogPattern("option_rejected", r"(?P<why>Invalid device ID: .*)"),
    LogPattern("option_rejected", r"(?P<why>Failed to parse provider option .*)"),
    LogPattern("option_rejected", r"(?P<why>The value for the key '[^']+' should be .*)"),
    LogPattern("device_missing", r"(?P<why>no CUDA-capable device is detected.*)"),
    LogPattern("device_missing", r"(?P<why>No devices found for EP '.*)"),
    LogPattern("device_missing", r"(?P<why>No registered plugin EP device found for '.*)"),
)
"""Tried in this order, after the provider's own patterns."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a provider is not usable."""

    reason: ReasonCode
    """A provider-level reason."""
    evidence: str
    """Original message on one line."""
    remedy: Remedy


def explain(provider: Provider, lines: Iterable[str]) -> Failure:
    """The failure in log lines and error messages of a failed start, the most specific first.

    If no pattern matches: initialisation_failed with the first line as evidence.
    """
    messages = [one_line(line) for line in lines if line.strip()]
    for pattern in (*provider.start_patterns, *START_PATTERNS):
        for line in messages:
            if match := re.search(pattern.pattern, line):
                reason = (match.groupdict().get("why") or line).strip(" .") or line
                return failure(provider, pattern.reason, reason)
    first = next(iter(messages), "ONNX Runtime did not start it and gave no reason")
    return failure(provider, "initialisation_failed", first)


def failure(provider: Provider, reason: ReasonCode, evidence: str) -> Failure:
    """A failure with the remedy of the missing library, of the provider, or the default, in this order.

    The default for a provider that is not in the build installs its wheel, or its plugin.
    """
    by_library = provider.libraries.items() if reason == "library_missing" else ()
    remedy = next((found for file, found in by_library if file in evidence), provider.remedies.get(reason))
    if remedy is None and reason == "not_in_build":
        listed = [INSTALL.filled(wheel=wheel) for wheel in provider.wheels[:1]]
        listed += [INSTALL_PLUGIN.filled(wheel=provider.plugin.wheel)] if provider.plugin else []
        remedy = any_of(listed)
    return Failure(reason, cut(one_line(evidence), LONGEST), remedy or REMEDIES.get(reason, WHATEVER_ELSE))


def no_device(provider: Provider, library: Path) -> Failure:
    """The failure of a plugin library that loads but offers no device."""
    plugin = provider.plugin
    only = f"; it supports only {plugin.offered_devices}" if plugin is not None and plugin.offered_devices else ""
    evidence = f"{library.name} was registered but offers no device on this machine{only}"
    reason = failure(provider, "device_missing", evidence)
    return reason if plugin is None or plugin.no_device is None else replace(reason, remedy=plugin.no_device)


def one_line(text: str) -> str:
    """A native message on one line, without control characters and source locations."""
    return clean(without_signatures(" ".join(text.split())))
