"""Why a provider could not start: ONNX Runtime's words matched with the patterns of the provider, and what to do.

Pure text in, Resolution-ready facts out. Knows no provider; the patterns and remedies are theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from partita.observations.codes import ReasonCode
from partita.observations.native_text import cut, without_signatures
from partita.observations.text_format import clean
from partita.providers.base import OTHER_RUNTIME, Library, Provider
from partita.providers.patterns import START_PATTERNS
from partita.remedies import Remedy

LONGEST = 300
"""Most characters of evidence; what is longer is cut."""
WHATEVER_ELSE = Remedy("see what it needs", ("partita", "providers"))
REMEDIES: dict[ReasonCode, Remedy] = {
    "not_in_build": Remedy("install an ONNX Runtime that contains it"),
    "device_missing": Remedy("run it on a machine that has such a device"),
    "version_mismatch": OTHER_RUNTIME,
}
"""What to do where the provider's file has nothing better; `WHATEVER_ELSE` for the other reasons."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a provider is not usable."""

    reason: ReasonCode
    """A provider-level one."""
    evidence: str
    """One line, in the words of whoever said it."""
    remedy: Remedy


def explain(provider: Provider, lines: Iterable[str]) -> Failure:
    """Read what was logged and raised when `provider` did not start, most telling text first.

    Without a line that any pattern knows the reason is initialisation_failed, with the first line as its evidence.
    """
    said = [one_line(line) for line in lines if line.strip()]
    for pattern in (*provider.start_patterns, *START_PATTERNS):
        for line in said:
            if match := re.search(pattern.pattern, line):
                why = (match.groupdict().get("why") or line).strip(" .") or line
                return failure(provider, pattern.reason, why)
    return failure(
        provider, "initialisation_failed", said[0] if said else "ONNX Runtime did not start it and gave no reason"
    )


def failure(provider: Provider, reason: ReasonCode, evidence: str, missing: str | None = None) -> Failure:
    """A failure with the remedy that fits it best: that of the library that is missing, the provider's, or the general.

    `missing`: the file, where it is known; None: the one that `evidence`, in foreign words, names.
    """
    library = (
        _named_library(provider, evidence if missing is None else missing) if reason == "library_missing" else None
    )
    remedy = library.remedy if library else provider.remedy(reason) or REMEDIES.get(reason, WHATEVER_ELSE)
    shown = one_line(evidence)
    return Failure(reason, cut(shown, LONGEST), remedy)


def no_device(provider: Provider, library: Path) -> Failure:
    """The failure of a plugin library that loads and offers no device, with the plugin's own remedy."""
    evidence = f"{library.name} was registered but offers no device on this machine{provider.plugin_takes}"
    why = failure(provider, "device_missing", evidence)
    own = None if provider.plugin is None else provider.plugin.no_device
    return why if own is None else replace(why, remedy=own)


def _named_library(provider: Provider, text: str) -> Library | None:
    """The library of the provider that `text` names."""
    return next((library for library in provider.libraries if library.file in text), None)


def one_line(text: str) -> str:
    """Foreign text on one line, without control characters and without places in somebody's source."""
    return clean(without_signatures(" ".join(text.split())))
