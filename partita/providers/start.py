"""Reason and remedy for a provider that could not start, from log lines and error messages.

Wording of ONNX Runtime 1.31.1 and cudaGetErrorString.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from partita.observations.codes import ReasonCode
from partita.observations.native_text import cut, without_signatures
from partita.observations.patterns import LogPattern
from partita.observations.text_format import clean
from partita.providers.base import OPTIONS, OTHER_RUNTIME, Provider
from partita.remedies import Remedy

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
    LogPattern(
        "library_missing", r"with error: (?P<why>\S+: cannot open shared object file: No such file or directory)"
    ),
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
    return failure(
        provider,
        "initialisation_failed",
        messages[0] if messages else "ONNX Runtime did not start it and gave no reason",
    )


def failure(provider: Provider, reason: ReasonCode, evidence: str, missing: str | None = None) -> Failure:
    """A failure with the remedy of the missing library, of the provider, or the default, in this order.

    `missing`: the missing file; None: the library that `evidence` names.
    """
    named = (evidence if missing is None else missing) if reason == "library_missing" else ""
    library = next((library for library in provider.libraries if library.file in named), None)
    remedy = library.remedy if library else provider.remedy(reason) or REMEDIES.get(reason, WHATEVER_ELSE)
    return Failure(reason, cut(one_line(evidence), LONGEST), remedy)


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
