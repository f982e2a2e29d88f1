"""`--target`: the provider that a package is exported for, and functions that probe it with a graph.

The provider is probed itself if it runs here. CUDA without a GPU is probed over stub libraries, with the provider's own
placement. For others a default is used, if the user allows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partita.errors import PartitaError, ProviderError, UsageError
from partita.export.target import Kernels, NodeSupport, Probe, ProbeResult, Question, ReplayTarget, Smoke, Target
from partita.library.api import QUIET, Audience
from partita.observations.names import CPU
from partita.options.fields import PathText
from partita.options.groups import ProviderValues
from partita.package.folder import Manifest
from partita.package.records import SmokeRecord, Verification
from partita.providers.base import Provider
from partita.providers.cuda import PROVIDER as CUDA
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options
from partita.providers.resolve import Resolution, all_names, parse_chain, resolve_one

if TYPE_CHECKING:
    from partita.runtime.lab.laboratory import Lab

SOURCE = "--target"
"""Source of the target, as in a manifest."""
ASK_SECONDS = 120.0
"""Seconds for all probes of one lowering. A graph has some sixty distinct nodes; a GPU may compile for each."""


def find_target(
    name: str | None,
    options: Mapping[str, ProviderValues],
    *,
    default_allowed: bool,
    libraries: Mapping[str, PathText],
    audience: Audience = QUIET,
) -> Target:
    """The provider `name`, or else the first provider of the default chain on this machine.

    `options`: by provider. `libraries`: plugin providers of the user. Raises UsageError for an invalid name or option,
    ProviderError when the provider cannot be probed here and the default is not allowed.
    """
    from partita.runtime.chain.provider_check import best_chain, check
    from partita.runtime.ort.registry import available_ort_names, unpacks_weights

    available = available_ort_names()
    if name is None:
        best = best_chain(available)
        provider, source = best.chain[0], f"default: {best.reason}"
    else:
        provider, source = _one_provider(name, parse_libraries(libraries, all_names(), "target_libraries")), SOURCE
    named = parse_options(options, (provider,), "target_options") if options or name is not None else {}
    resolution = resolve_one(provider, available, named.get(provider.name, {}))
    target = partial(
        Target,
        provider.name,
        source,
        provider.preferred_attention,
        by_default=name is None,
        kernels=Kernels(**asdict(provider.packed_weights), folds=provider.compiles),
        rolls=provider.rolling_caches,
        constant_defaults=provider.constant_defaults,
    )
    if provider.ort_name == CPU:
        return target(
            how="directly",
            ask=_asker(resolution),
            supports=_taker(resolution),
            replay=_as_verified(provider),
            smoke=_smoker(provider, {}),
            unpacks=unpacks_weights,
        )
    tried = check([resolution])[0].resolution
    if tried.status == "active":
        return target(
            how="directly",
            ask=_asker(tried),
            supports=_taker(tried),
            replay=_replayer(provider, named),
            smoke=_smoker(provider, named),
        )
    return _not_usable(target, provider, tried, default_allowed, audience)


def _not_usable(
    target: Callable[..., Target], provider: Provider, tried: Resolution, default_allowed: bool, audience: Audience
) -> Target:
    """The target for a provider that does not run here: probed over stub libraries, default, or refused."""
    cause = f"{tried.reason}: {tried.evidence}"
    if provider is CUDA and tried.reason in ("library_missing", "device_missing", "version_mismatch"):
        from partita.library.place.dry_run import dry_environment

        try:
            environment, played = dry_environment()
        except PartitaError as error:
            audience.note(f"a dry run of CUDA is not possible either: {error}")
        else:
            how = f"over stub libraries, as {played}: {tried.reason} here"
            stub = resolve_one(provider, (provider.ort_name,), tried.options)
            return target(how=how, ask=_asker(stub, environment), supports=_taker(stub, environment), not_here=cause)
    if not default_allowed:
        raise ProviderError(
            f"`target={provider.name}`: it cannot be probed here: {cause}; {tried.remedy}; or add "
            f"`target_default=True` to use `attention={provider.preferred_attention}` without "
            "probing, or set `attention` and no `target`"
        )
    return target(how=f"which could not be probed: {cause}", not_here=cause)


def _one_provider(name: str, libraries: tuple[Provider, ...] = ()) -> Provider:
    """The provider `name`, which may be in `libraries`. Raises UsageError for another, or an unused library."""
    chain = parse_chain(name, libraries, argument="target")
    if len(chain) != 1:
        raise UsageError(f"`target={name}`: name one provider; a package is exported for one and also runs on others")
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        what = f"`target_libraries`: {unused[0]} is not the provider"
        raise UsageError(f"{what} named by `target` ({chain[0].name})")
    return chain[0]


def _asker(resolution: Resolution, environment: Mapping[str, str] | None = None) -> Probe:
    """A function that probes the provider with a graph."""

    def ask(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        from partita.runtime.lab.tables import measure_graph as query

        with _lab(resolution, environment) as lab:
            found = query(model, sizes, lab)
        return ProbeResult(found.nodes, found.unsupported, found.failure, found.untested)

    return ask


def _taker(resolution: Resolution, environment: Mapping[str, str] | None = None) -> NodeSupport:
    """A function that probes the provider with nodes, each in its own model."""

    def takes(questions: Sequence[Question]) -> list[bool]:
        from partita.runtime.lab.tables import supports_each

        with _lab(resolution, environment) as lab:
            return supports_each(questions, lab)

    return takes


@contextmanager
def _lab(resolution: Resolution, environment: Mapping[str, str] | None) -> Iterator[Lab]:
    """Experiments on the provider, with stored answers. Raises ProviderError when it could not be probed."""
    from partita.runtime.lab.laboratory import Lab, cache_for

    with Lab(resolution, cache_for(resolution, environment), time.monotonic() + ASK_SECONDS, environment) as lab:
        yield lab
    if lab.unusable:
        raise ProviderError(f"`target={resolution.provider.name}`: it could not be probed: {lab.unusable}")


def supported_by_cpu(questions: Sequence[Question]) -> list[bool]:
    """Whether the CPU provider supports each of these nodes, for a package without a target."""
    from partita.runtime.ort.registry import available_ort_names

    (cpu,) = parse_chain("cpu")
    return list(_taker(resolve_one(cpu, available_ort_names(), {}))(questions))


def _replayer(provider: Provider, options: Mapping[str, Mapping[str, str]]) -> ReplayTarget:
    """A function that replays the reference logits on the provider alone."""

    def replay(folder: Path, manifest: Manifest) -> Verification:
        from partita.runtime.verify.replay import replay as replay_on

        return replay_on(folder, (provider,), manifest=manifest, options=options)

    return replay


def _smoker(provider: Provider, options: Mapping[str, Mapping[str, str]]) -> Smoke:
    """A function that opens and runs a package on the provider, followed by CPU if necessary."""

    def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
        from partita.runtime.verify.replay import smoke as run

        try:
            return run(folder, (provider,), manifest=manifest, options=options)
        except ProviderError:
            if provider.ort_name == CPU:
                raise
            return run(folder, (provider, *parse_chain("cpu")), manifest=manifest, options=options)

    return smoke


def _as_verified(provider: Provider) -> ReplayTarget:
    """A replay on the CPU provider, for a package that was verified as float32."""
    itself = _replayer(provider, {})

    def replay(folder: Path, manifest: Manifest) -> Verification:
        return manifest.verification if manifest.verification.twin is None else itself(folder, manifest)

    return replay
