"""Providers that ONNX Runtime does not contain: their libraries registered, and whether one wheel overwrote another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partita.observations.native_text import cut
from partita.providers.resolve import Resolution
from partita.providers.start import LONGEST, REMEDIES, WHATEVER_ELSE, Failure, explain, no_device
from partita.remedies import Remedy
from partita.runtime.ort.buffers import NATIVE_ERRORS
from partita.runtime.ort.native_log import captured_output, complaints, headless
from partita.runtime.ort.registry import register_library
from partita.runtime.wheels import duplicate_remedy, duplicate_runtime, runtime_wheels

CRASHED = Remedy("name another provider, or see whether this one starts by itself", ("partita", "providers"))


def registered(chain: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The chain once plugin libraries are registered: one that does not load, or has no device, is unavailable."""
    return tuple(
        _register(resolution)
        if resolution.library is not None and resolution.status == "active"
        else _overwritten(resolution)
        for resolution in chain
    )


def without_crashed(chain: Sequence[Resolution], crashed: Mapping[str, str]) -> tuple[Resolution, ...]:
    """The chain without providers whose native code ended a process before, by name, with how it ended.

    What a provider advises where it does not start is no help: it had started, and ended over a graph.
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


def _overwritten(resolution: Resolution) -> Resolution:
    """A provider that the build lacks although a wheel that contains it is installed: another wheel overwrote it."""
    if resolution.status == "active" or resolution.reason != "not_in_build":
        return resolution
    owners = runtime_wheels()
    if len(owners) < 2 or not {owner.name for owner in owners} & set(resolution.provider.wheels):
        return resolution
    finding = duplicate_runtime(owners)
    return unavailable(resolution, Failure("duplicate_runtime", finding.evidence, duplicate_remedy(owners)))


def _register(resolution: Resolution) -> Resolution:
    """Register the library of one provider. A library may call its provider otherwise than the user does."""
    assert resolution.library is not None
    provider = resolution.provider
    with captured_output() as captured:
        try:
            offered = register_library(provider.ort_name, resolution.library)
        except NATIVE_ERRORS as error:
            raised = str(error)
            offered = None
    if offered is None:
        return unavailable(
            resolution, explain(provider, [raised, *complaints(captured.lines), *headless(captured.lines)])
        )
    if not offered:
        return unavailable(resolution, no_device(provider, resolution.library))
    if provider.ort_name in offered:
        return resolution
    return replace(resolution, provider=replace(provider, ort_name=offered[0]))


def unavailable(resolution: Resolution, failure: Failure) -> Resolution:
    """The provider is not used, and this is why. A remedy that sets an option as it is set has no effect."""
    provider, options = resolution.provider, resolution.options
    values = (f"{provider.name}.{each.name}={options.get(each.name, each.default)}" for each in provider.options)
    remedy: Remedy | None = failure.remedy
    if failure.remedy.options[1:] and failure.remedy.options[1] in values:
        remedy = failure.remedy.otherwise or REMEDIES.get(failure.reason, WHATEVER_ELSE)
    return replace(resolution, status="unavailable", reason=failure.reason, evidence=failure.evidence, remedy=remedy)
