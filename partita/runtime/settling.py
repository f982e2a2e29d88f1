"""What becomes of the providers of a chain: whose fault it is that no session opens, and who is in one that did.

Knows the ways in which ONNX Runtime leaves a provider out without saying so: it skips one that it cannot start, drops
one for a model, or registers one that has no backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import ProviderError
from partita.observations.names import CPU
from partita.providers.patterns import DROPPED
from partita.providers.resolve import Resolution, known_providers
from partita.providers.start import Failure, explain
from partita.remedies import Remedy, any_of
from partita.runtime.option_trials import by_experiment, starts
from partita.runtime.ort.errors import STRICT, blames_provider, one_line
from partita.runtime.ort.native_log import complaints, headless
from partita.runtime.ort.session import NativeFailureError, Opening, Session, open_native
from partita.runtime.registering import unavailable

WHOLE = 20_000
"""Characters of a message that patterns look through: OpenVINO names the cause at the end of a C++ signature."""
LIBRARY = re.compile(r"onnxruntime_providers_([a-z]+)")
"""The library of a provider in a line that says why it does not load; the name is ours for those that have one."""
OTHER_OPSET = Remedy("convert the model to another opset, or use another version of ONNX Runtime")


def active_of(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The providers that are still to be used."""
    return tuple(resolution for resolution in chain if resolution.status == "active")


def ort_names(chain: Sequence[Resolution]) -> tuple[str, ...]:
    """ONNX Runtime's names of the providers."""
    return tuple(resolution.provider.ort_name for resolution in chain)


def said(failure: NativeFailureError) -> list[str]:
    """What ONNX Runtime said when it failed, most telling text first."""
    texts = (str(failure), *complaints(failure.log), *headless(failure.log))
    return [one_line(text, WHOLE) for text in texts]


def to_blame(active: Sequence[Resolution], failure: NativeFailureError) -> Resolution | None:
    """The provider whose fault it is that the session could not be opened; None when it is the model's.

    A provider that is named in the message, or whose own words are in it, is to blame. Words that several have (those
    of CUDA's libraries) and a failure that any provider can cause tell of none: of several the first is to blame that
    does not start with a model of one node, and where all do the first one that is not the CPU's.
    """
    others = [resolution for resolution in active if resolution.provider.ort_name != CPU]
    if not others or not blames_provider(failure.error):
        return None
    lines = said(failure)
    for resolution in others:
        own = [pattern.pattern for pattern in resolution.provider.start_patterns]
        if any(resolution.provider.ort_name in line or any(re.search(text, line) for text in own) for line in lines):
            return resolution
    if len(others) == 1:
        return others[0]
    return next((resolution for resolution in others if not starts(resolution)), others[0])


def only_suspect(path: Path, active: Sequence[Resolution], opening: Opening) -> Resolution | None:
    """The one provider besides the CPU's, when ONNX Runtime opens the same model without it; None otherwise.

    A kernel's constructor that raises reads like a model that is not sound.
    """
    others = [resolution for resolution in active if resolution.provider.ort_name != CPU]
    if len(others) != 1:
        return None
    alone = Resolution(known_providers()["cpu"], "active")
    return others[0] if opens(path, [alone], replace(opening, observe=False, strict=False, config={})) else None


def opens(path: Path, active: Sequence[Resolution], opening: Opening) -> bool:
    """Whether ONNX Runtime opens the model so."""
    try:
        open_native(path, active, opening).close()
    except NativeFailureError:
        return False
    return True


def left_out(chain: Sequence[Resolution], blamed: Resolution, failure: Failure) -> tuple[Resolution, ...]:
    """The chain without one provider."""
    return tuple(unavailable(entry, failure) if entry is blamed else entry for entry in chain)


def settle(chain: Sequence[Resolution], session: Session) -> tuple[Resolution, ...]:
    """The chain after the session was opened: a provider that ONNX Runtime left out is unavailable, with its reason.

    Raises ProviderError when none is left, or ONNX Runtime registered one that is not in the chain. The CPU provider is
    always registered; outside the chain it holds no node, or opening would have failed.
    """
    settled = tuple(settle_one(resolution, session.registered, session.log, chain) for resolution in chain)
    settled = tuple(without_backend(resolution, session) for resolution in settled)
    active = ort_names(active_of(settled))
    if not active:
        raise ProviderError(nothing_left(settled), remedy=what_helps(settled))
    strangers = [name for name in session.registered if name not in (*ort_names(chain), CPU)]
    if strangers:
        raise ProviderError(f"ONNX Runtime registered {', '.join(strangers)}, which the provider chain does not name")
    return settled


def settle_one(
    resolution: Resolution, names: Sequence[str], log: tuple[str, ...], chain: Sequence[Resolution]
) -> Resolution:
    """What became of one provider of the chain: it was not registered, or it was dropped for this model, or it is
    active.
    """
    provider = resolution.provider
    if resolution.status != "active":
        return resolution
    if provider.ort_name not in names:
        others = {entry.provider.name for entry in chain} - {provider.name}
        named = [(line, set(LIBRARY.findall(line))) for line in log]
        own = tuple(line for line, found in named if provider.name in found or not others & found)
        lines = [line for line in complaints(own) if STRICT not in line]
        return unavailable(resolution, by_experiment(resolution, explain(provider, lines)))
    for line in log:
        dropped = re.search(DROPPED.pattern, line)
        if dropped and dropped["provider"] == provider.ort_name:
            why = Failure(DROPPED.reason, one_line(line[dropped.start() :]), OTHER_OPSET)
            return unavailable(resolution, why)
    return resolution


def without_backend(resolution: Resolution, session: Session) -> Resolution:
    """A provider that compiles may be registered without its own backend, take no node, and only log why (QNN)."""
    provider = resolution.provider
    if resolution.status != "active" or not provider.compiles:
        return resolution
    listed = session.assigned()
    if listed is None or any(node.provider == provider.ort_name for node in listed):
        return resolution
    why = explain(provider, [*complaints(session.log), *headless(session.log)])
    return resolution if why.reason == "initialisation_failed" else unavailable(resolution, why)


def nothing_left(chain: Sequence[Resolution]) -> str:
    """One line on why no provider of the chain can run; `what_helps` has what to do."""
    return "; ".join(f"{r.provider.name}: {r.reason}: {r.evidence}" for r in chain)


def what_helps(chain: Sequence[Resolution]) -> Remedy | None:
    """What to do about providers that cannot run, those of the chain's first one first."""
    return any_of(r.remedy for r in chain if r.remedy is not None)
