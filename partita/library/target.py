"""`--target`: the provider that a package is made for, and how it can be asked about a graph.

It is asked itself where it runs here. CUDA without a GPU is asked over stub libraries: placement is the
provider's own there, too. Others cannot be asked, and a default is taken only when the user said so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partita.errors import PartitaError, ProviderError, UsageError
from partita.export.quantisation.kernels import Kernels
from partita.export.target import Answer, Ask, Question, ReplayTarget, Smoke, TakesEach, Target, Timed
from partita.library.audience import QUIET, Audience
from partita.observations.names import CPU
from partita.options import PathText, ProviderValues
from partita.package import Manifest
from partita.package_records import SmokeRecord, Verification
from partita.providers.base import Provider
from partita.providers.cuda import PROVIDER as CUDA
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options
from partita.providers.resolve import Resolution, all_names, parse_chain, resolve_one
from partita.spelling import spelled

if TYPE_CHECKING:
    from partita.runtime.lab.laboratory import Lab

SOURCE = "--target"
"""Where the target comes from, as a manifest says it."""
ASK_SECONDS = 120.0
"""For all questions about one lowering. A graph has some sixty distinct nodes; a GPU may compile for each."""


def find_target(
    name: str | None,
    options: Mapping[str, ProviderValues],
    *,
    default_allowed: bool,
    libraries: Mapping[str, PathText],
    audience: Audience = QUIET,
) -> Target:
    """The provider a package is for: the one that was named, else the one that would lead a chain on this machine.

    `options`: by provider. `libraries`: of plugin providers that the user brings. Raises UsageError for a name or
    option that makes no sense, ProviderError when the provider cannot be asked here and the default was not allowed.
    """
    from partita.runtime.ort.registry import available_ort_names
    from partita.runtime.provider_check import best_chain, check

    available = available_ort_names()
    if name is None:
        best = best_chain(available)
        provider, source = best.chain[0], f"default: {best.reason}"
        named = parse_options(options, (provider,), "target_options") if options else {}
    else:
        provider = _one_provider(name, parse_libraries(libraries, all_names(), "target_libraries"))
        source = SOURCE
        named = parse_options(options, (provider,), "target_options")
    resolution = resolve_one(provider, available, named.get(provider.name, {}))
    if provider.ort_name == CPU:
        target = Target(
            provider.name,
            source,
            provider.preferred_attention,
            "directly",
            ask=_asker(resolution),
            takes=_taker(resolution),
            replay=_as_verified(provider),
            smoke=_smoker(provider, {}),
            unpacks=_unpacks,
            times=partial(_times, resolution),
            compares=partial(_compares, resolution),
        )
    elif (tried := check([resolution])[0]).usable:
        target = Target(
            provider.name,
            source,
            provider.preferred_attention,
            "directly",
            ask=_asker(tried.resolution),
            takes=_taker(tried.resolution),
            replay=_replayer(provider, named),
            smoke=_smoker(provider, named),
        )
    else:
        target = _not_usable(
            provider, source, tried.resolution, named.get(provider.name, {}), default_allowed, audience
        )
    return replace(
        target,
        by_default=name is None,
        kernels=_kernels(provider),
        rolls=provider.rolling_caches,
        constant_defaults=provider.constant_defaults,
    )


def _unpacks(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the CPU provider has no kernel for packed weights on this machine, and says so when it runs."""
    from partita.runtime.ort.run_log import unpacks_weights

    return unpacks_weights(model, sizes)


def _times(cpu: Resolution, questions: Sequence[Question]) -> list[float]:
    """Seconds that products take on the CPU provider of this machine."""
    from partita.runtime.cpu.products import product_seconds

    return product_seconds(questions, cpu)


def _compares(cpu: Resolution, products: Sequence[Timed], plain: Timed) -> list[tuple[float, float]]:
    """Seconds that products take on the CPU provider of this machine, and a plain one beside them."""
    from partita.runtime.cpu.products import compared

    return compared(products, plain, cpu)


def _kernels(provider: Provider) -> Kernels:
    """What is known of how a provider takes packed weights, as the exporter has it."""
    known = provider.packed_weights
    return Kernels(
        symmetric=known.symmetric,
        accuracy_level=known.accuracy_level,
        bias=known.bias,
        gather=known.gather,
        experts=known.experts,
        block_sizes=known.block_sizes,
        folds=provider.compiles,
        activations=known.activations,
    )


def _one_provider(name: str, libraries: tuple[Provider, ...] = ()) -> Provider:
    """The provider called `name`, which may be one of `libraries`.

    Raises UsageError for a chain, a name that nobody has, or a library of another provider.
    """
    chain = parse_chain(name, libraries, argument="target")
    if len(chain) != 1:
        raise UsageError(
            f"{spelled('target', name)}: name one provider; a package is made for one, and still runs on others"
        )
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        what = f"{spelled('target_libraries')}: {unused[0]} is not the provider"
        raise UsageError(f"{what} that {spelled('target')} names ({chain[0].name})")
    return chain[0]


def _not_usable(
    provider: Provider,
    source: str,
    why: Resolution,
    options: Mapping[str, str],
    default_allowed: bool,
    audience: Audience,
) -> Target:
    """A target that does not run here: asked over stub libraries with the `options` that were given, or taken by
    default, or refused.
    """
    cause = f"{why.reason}: {why.evidence}"
    if provider is CUDA and why.reason in ("library_missing", "device_missing", "version_mismatch"):
        from partita.library.dry_run import dry_environment

        try:
            environment, played = dry_environment()
        except PartitaError as error:
            audience.note(f"a dry run of CUDA is not possible either: {error}")
        else:
            how = f"over stub libraries, as {played}: {why.reason} here"
            played_by = resolve_one(provider, (provider.ort_name,), options)
            ask, takes = _asker(played_by, environment), _taker(played_by, environment)
            return Target(provider.name, source, provider.preferred_attention, how, ask, takes=takes, not_here=cause)
    if not default_allowed:
        raise ProviderError(
            f"{spelled('target', provider.name)}: it cannot be queried here: {cause}; {why.remedy}; or add "
            f"{spelled('target_default', True)} to take {spelled('attention', provider.preferred_attention)} without "
            f"asking, or name an {spelled('attention')} and no {spelled('target')}"
        )
    how = f"which could not be queried: {cause}"
    return Target(provider.name, source, provider.preferred_attention, how, not_here=cause)


def _asker(resolution: Resolution, environment: Mapping[str, str] | None = None) -> Ask:
    """A function that asks the provider about a graph."""

    def ask(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> Answer:
        from partita.runtime.lab.tables import ask as put

        with _lab(resolution, environment) as lab:
            told = put(model, sizes, lab)
        return Answer(told.nodes, told.left, told.fails, told.unasked)

    return ask


def _taker(resolution: Resolution, environment: Mapping[str, str] | None = None) -> TakesEach:
    """A function that asks the provider about nodes, each in a model of its own."""

    def takes(questions: Sequence[Question]) -> list[bool]:
        from partita.runtime.lab.tables import takes_each

        with _lab(resolution, environment) as lab:
            return takes_each(questions, lab)

    return takes


@contextmanager
def _lab(resolution: Resolution, environment: Mapping[str, str] | None) -> Iterator[Lab]:
    """Experiments on the provider, whose answers are kept. Raises ProviderError when it could not be queried."""
    from partita.runtime.lab.laboratory import Lab, cache_for

    with Lab(resolution, cache_for(resolution, environment), time.monotonic() + ASK_SECONDS, environment) as lab:
        yield lab
    if lab.unusable:
        raise ProviderError(f"{spelled('target', resolution.provider.name)}: it could not be queried: {lab.unusable}")


def taken_by_cpu(questions: Sequence[Question]) -> list[bool]:
    """Whether the CPU provider takes each of these nodes: for a package that no target was named for."""
    from partita.runtime.ort.registry import available_ort_names

    (cpu,) = parse_chain("cpu")
    return list(_taker(resolve_one(cpu, available_ort_names(), {}))(questions))


def _replayer(provider: Provider, options: Mapping[str, Mapping[str, str]]) -> ReplayTarget:
    """A function that replays the known answer on the provider alone."""

    def replay(folder: Path, manifest: Manifest) -> Verification:
        from partita.runtime.verify import replay as replay_on

        return replay_on(folder, (provider,), manifest=manifest, options=options)

    return replay


def _smoker(provider: Provider, options: Mapping[str, Mapping[str, str]]) -> Smoke:
    """A function that opens and runs a package on the provider, with the CPU provider after it where it must be."""

    def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
        from partita.runtime.verify import smoke as run

        try:
            return run(folder, (provider,), manifest=manifest, options=options)
        except ProviderError:
            if provider.ort_name == CPU:
                raise
            return run(folder, (provider, *parse_chain("cpu")), manifest=manifest, options=options)

    return smoke


def _as_verified(provider: Provider) -> ReplayTarget:
    """Every package is verified on the CPU provider, unless that was a twin of it: then it is replayed itself."""
    itself = _replayer(provider, {})

    def replay(folder: Path, manifest: Manifest) -> Verification:
        return manifest.verification if manifest.verification.twin is None else itself(folder, manifest)

    return replay
