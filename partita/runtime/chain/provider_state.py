"""The state of each provider of a chain: registers plugin libraries and finds why ONNX Runtime left a provider out.

ONNX Runtime may skip a provider that it cannot start, drop one for a model, or register one without its backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from partita.errors import ProviderError
from partita.observations.names import CPU
from partita.observations.native_text import cut
from partita.providers.resolve import (
    DROPPED,
    LONGEST,
    REMEDIES,
    WHATEVER_ELSE,
    Failure,
    Resolution,
    explain,
    known_providers,
    no_device,
    resolve_one,
)
from partita.providers.resolve import failure as failure_of
from partita.remedies import Remedy, any_of
from partita.runtime.chain.provider_check import PROBE_MODEL
from partita.runtime.machine import duplicate_runtime, runtime_wheels
from partita.runtime.ort.buffers import NATIVE_ERRORS
from partita.runtime.ort.errors import STRICT, one_line
from partita.runtime.ort.native_log import captured_output, complaints, headless
from partita.runtime.ort.registry import register_library
from partita.runtime.ort.session import NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening

SEARCHED_CHARACTERS = 20_000
"""Characters of a message that patterns search: OpenVINO names the cause at the end of a C++ signature."""
START_MODEL = Path("start.onnx")
"""The name of `PROBE_MODEL` in messages; there is no such file."""
LIBRARY = re.compile(r"onnxruntime_providers_([a-z]+)")
"""The name of a provider library in a load error."""
OTHER_OPSET = Remedy("convert the model to another opset, or use another version of ONNX Runtime")
CRASHED = Remedy(
    "use another provider, or check whether this provider starts without the others", ("partita", "providers")
)


def active_of(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The active providers of a chain."""
    return tuple(resolution for resolution in chain if resolution.status == "active")


def ort_names(chain: Sequence[Resolution]) -> tuple[str, ...]:
    """ONNX Runtime's names of the providers."""
    return tuple(resolution.provider.ort_name for resolution in chain)


def no_provider_text(chain: Sequence[Resolution]) -> str:
    """One line on why no provider of the chain can run; see `remedy_for` for a remedy."""
    return "; ".join(f"{r.provider.name}: {r.reason}: {r.evidence}" for r in chain)


def remedy_for(chain: Sequence[Resolution]) -> Remedy | None:
    """The remedy for providers that cannot run; the first provider's remedy comes first."""
    return any_of(r.remedy for r in chain if r.remedy is not None)


def unavailable(resolution: Resolution, failure: Failure) -> Resolution:
    """The resolution of an unused provider, with the reason. A remedy that sets an option to its value is replaced."""
    provider, options = resolution.provider, resolution.options
    values = (f"{provider.name}.{each.name}={options.get(each.name, each.default)}" for each in provider.options)
    remedy: Remedy | None = failure.remedy
    if failure.remedy.options[1:] and failure.remedy.options[1] in values:
        remedy = failure.remedy.alternative or REMEDIES.get(failure.reason, WHATEVER_ELSE)
    return replace(resolution, status="unavailable", reason=failure.reason, evidence=failure.evidence, remedy=remedy)


def without_crashed(chain: Sequence[Resolution], crashed: Mapping[str, str]) -> tuple[Resolution, ...]:
    """The chain without providers whose native code crashed. `crashed`: how the process ended, by provider name.

    Remedies for a provider that does not start do not apply: it started and crashed on a graph.
    """
    return tuple(
        replace(
            unavailable(entry, Failure("initialisation_failed", cut(crashed[entry.provider.name], LONGEST), CRASHED)),
            crashed=True,
        )
        if entry.status == "active" and entry.provider.name in crashed
        else entry
        for entry in chain
    )


# --- before a session is opened ---------------------------------------------------------------------------------------


def register_plugins(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The chain after plugin libraries are registered; a plugin that does not load or has no device is unavailable."""
    return tuple(
        _register(entry) if entry.library is not None and entry.status == "active" else _overwritten(entry)
        for entry in chain
    )


def _overwritten(resolution: Resolution) -> Resolution:
    """A provider missing from the build although an installed wheel contains it: another wheel overwrote its files."""
    if resolution.status == "active" or resolution.reason != "not_in_build":
        return resolution
    owners = runtime_wheels()
    if len(owners) < 2 or not {owner.name for owner in owners} & set(resolution.provider.wheels):
        return resolution
    return unavailable(resolution, duplicate_runtime(owners))


def _register(resolution: Resolution) -> Resolution:
    """Register the library of one provider. It may name its provider differently than the user does."""
    assert resolution.library is not None
    provider, raised, offered = resolution.provider, "", None
    with captured_output() as captured:
        try:
            offered = register_library(provider.ort_name, resolution.library)
        except NATIVE_ERRORS as error:
            raised = str(error)
    if offered is None:
        lines = [raised, *complaints(captured.lines), *headless(captured.lines)]
        return unavailable(resolution, explain(provider, lines))
    if not offered:
        return unavailable(resolution, no_device(provider, resolution.library))
    if provider.ort_name in offered:
        return resolution
    return replace(resolution, provider=replace(provider, ort_name=offered[0]))


# --- when no session opens --------------------------------------------------------------------------------------------


def messages_of(failure: NativeFailureError) -> list[str]:
    """ONNX Runtime's messages about a session that it could not open, most specific first."""
    texts = (str(failure), *complaints(failure.log), *headless(failure.log))
    return [one_line(text, SEARCHED_CHARACTERS) for text in texts]


def to_blame(
    path: Path, active: Sequence[Resolution], failure: NativeFailureError, opening: Opening
) -> Resolution | None:
    """The provider to leave out next: the first that a message names, else the first without which the model `path`
    opens, else the first; None without one but CPU.

    If the session does not open without it either, the model is the cause.
    """
    others = [resolution for resolution in active if resolution.provider.ort_name != CPU]
    # Folders of models have names of providers.
    lines = [line.replace(str(path.parent), "") for line in messages_of(failure)]
    for resolution in others:
        provider = resolution.provider
        name = rf"(?<![a-z0-9]){re.escape(provider.name)}(?![a-z0-9_])|{re.escape(provider.ort_name)}"
        patterns = [name, *(pattern.pattern for pattern in provider.start_patterns)]
        if any(re.search(each, line, re.IGNORECASE) for each in patterns for line in lines):
            return resolution
    rest = [(entry, [other for other in active if other is not entry]) for entry in others if len(others) > 1]
    return next((entry for entry, left in rest if opens_on(path, left, opening)), next(iter(others), None))


def opens_on(path: Path, active: Sequence[Resolution], opening: Opening) -> tuple[str, ...]:
    """The providers that ONNX Runtime registers for the model, with nodes on the CPU provider allowed; empty if it does
    not open.
    """
    try:
        with closing(open_native(path, active, replace(opening, observe=False, strict=False))) as session:
            return session.registered
    except NativeFailureError:
        return ()


def by_experiment(resolution: Resolution, found: Failure) -> Failure:
    """The failure, as `option_rejected` if the provider starts without one of its options, or without all of them.

    Only a failure of unknown cause is tested. Messages about options differ by provider, and some name no option.
    """
    options = resolution.options
    if found.reason != "initialisation_failed" or not options or starts(resolution):
        return found
    left_out = [(name,) for name in options] + ([tuple(options)] if len(options) > 1 else [])
    for names in left_out:
        kept = {name: value for name, value in options.items() if name not in names}
        if starts(replace(resolution, options=kept)):
            named = " and ".join(f"{name}={options[name]}" for name in names)
            them = "it" if len(names) == 1 else "them"
            evidence = f"it does not start together with {named}, but does without {them}: {found.evidence}"
            return failure_of(resolution.provider, "option_rejected", evidence)
    return found


def starts(resolution: Resolution) -> bool:
    """Whether ONNX Runtime opens a model of one node on the provider."""
    chain = [resolution, resolve_one(known_providers()["cpu"], (CPU,))]
    return resolution.provider.ort_name in opens_on(START_MODEL, chain, Opening(model=PROBE_MODEL))


# --- when a session is open -------------------------------------------------------------------------------------------


def settle(chain: Sequence[Resolution], session: Session) -> tuple[Resolution, ...]:
    """The state of every provider of the chain in an open session; one that ONNX Runtime left out is unavailable.

    Raises ProviderError if ONNX Runtime registered a provider outside the chain. The CPU provider is always registered;
    outside the chain it has no nodes.
    """
    strangers = [name for name in session.registered if name not in (*ort_names(chain), CPU)]
    if strangers:
        raise ProviderError(
            f"ONNX Runtime registered {', '.join(strangers)}, which the provider chain does not include"
        )
    return tuple(settle_one(resolution, session, chain) for resolution in chain)


def settle_one(resolution: Resolution, session: Session, chain: Sequence[Resolution]) -> Resolution:
    """The state of one provider: not registered, dropped for this model, registered without its backend, or active."""
    provider, log = resolution.provider, session.log
    if resolution.status != "active":
        return resolution
    if provider.ort_name not in session.registered:
        others = {entry.provider.name for entry in chain} - {provider.name}
        named = [(line, set(LIBRARY.findall(line))) for line in log]
        own = tuple(line for line, found in named if provider.name in found or not others & found)
        lines = [line for line in complaints(own) if STRICT not in line]
        return unavailable(resolution, by_experiment(resolution, explain(provider, lines)))
    for line in log:
        dropped = re.search(DROPPED.pattern, line)
        if dropped and dropped["provider"] == provider.ort_name:
            reason = Failure(DROPPED.reason, one_line(line[dropped.start() :]), OTHER_OPSET)
            return unavailable(resolution, reason)
    if provider.compiles and not any(node.provider == provider.ort_name for node in session.assigned()):
        # A compiling provider may be registered without its backend, run no nodes, and only log the reason (QNN).
        backend = explain(provider, [*complaints(log), *headless(log)])
        return resolution if backend.reason == "initialisation_failed" else unavailable(resolution, backend)
    return resolution
