"""`--target`: the provider that a package is exported for, and functions that probe it with a graph.

The provider is probed itself if it runs here. CUDA without a GPU is probed over stub libraries, with the provider's own
placement. For others a default is used, if the user allows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partita.errors import PartitaError, ProviderError, UsageError
from partita.export.target import Kernels, ProbeResult, Question, Target
from partita.library.api import QUIET, Audience
from partita.observations.names import CPU
from partita.options.fields import PathText
from partita.options.groups import ProviderValues
from partita.package.folder import Manifest
from partita.package.records import SmokeRecord, Verification
from partita.providers.cuda import PROVIDER as CUDA
from partita.providers.options import parse_libraries, parse_options
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
        plugins, source = parse_libraries(libraries, all_names(), "target_libraries"), SOURCE
        (provider,) = parse_chain(name, plugins, argument="target")
        unused = [plugin.name for plugin in plugins if plugin is not provider]
        if unused:
            message = f"{unused[0]} is not the provider named by `target` ({provider.name})"
            raise UsageError(f"`target_libraries`: {message}")
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
    is_cpu = provider.ort_name == CPU
    tried = resolution if is_cpu else check([resolution])[0].resolution
    if not is_cpu and tried.status != "active":
        return _not_usable(target, tried, default_allowed, audience)
    runs = ProviderRuns(tried, named)
    return target(
        how="directly",
        ask=runs.probe,
        supports=runs.supports,
        replay=runs.replay,
        smoke=runs.smoke,
        unpacks=unpacks_weights if is_cpu else None,
    )


def _not_usable(target: Callable[..., Target], tried: Resolution, default_allowed: bool, audience: Audience) -> Target:
    """The target for a provider that does not run here: probed over stub libraries, default, or refused."""
    provider, cause = tried.provider, f"{tried.reason}: {tried.evidence}"
    if provider is CUDA and tried.reason in ("library_missing", "device_missing", "version_mismatch"):
        from partita.providers.cuda_dry_run.stub_build import dry_environment

        try:
            environment, played = dry_environment()
        except PartitaError as error:
            audience.note(f"a dry run of CUDA is not possible either: {error}")
        else:
            how = f"over stub libraries, as {played}: {tried.reason} here"
            runs = ProviderRuns(resolve_one(provider, (provider.ort_name,), tried.options), environment=environment)
            return target(how=how, ask=runs.probe, supports=runs.supports, not_here=cause)
    if not default_allowed:
        raise ProviderError(
            f"`target={provider.name}`: it cannot be probed here: {cause}; {tried.remedy}; or add "
            f"`target_default=True` to use `attention={provider.preferred_attention}` without "
            "probing, or set `attention` and no `target`"
        )
    return target(how=f"which could not be probed: {cause}", not_here=cause)


@dataclass(frozen=True, slots=True)
class ProviderRuns:
    """Probes of one provider, and runs of packages on it."""

    resolution: Resolution
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The user's options of the provider, by provider name."""
    environment: Mapping[str, str] | None = None
    """Environment of a dry run; None: that of this process."""

    @contextmanager
    def lab(self) -> Iterator[Lab]:
        """Experiments on the provider, with stored answers. Raises ProviderError when it could not be probed."""
        from partita.runtime.lab.laboratory import Lab, cache_for

        cache, end = cache_for(self.resolution, self.environment), time.monotonic() + ASK_SECONDS
        with Lab(self.resolution, cache, end, self.environment) as lab:
            yield lab
        if lab.unusable:
            raise ProviderError(f"`target={self.resolution.provider.name}`: it could not be probed: {lab.unusable}")

    def probe(self, model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> ProbeResult:
        """Probe the provider with a graph."""
        from partita.runtime.lab.tables import measure_graph

        with self.lab() as lab:
            return ProbeResult(*measure_graph(model, sizes, lab))

    def supports(self, questions: Sequence[Question]) -> list[bool]:
        """Probe the provider with nodes, each in its own model."""
        from partita.runtime.lab.tables import supports_each

        with self.lab() as lab:
            return supports_each(questions, lab)

    def replay(self, folder: Path, manifest: Manifest) -> Verification:
        """Replay the reference logits on the provider alone; on the CPU only if a copy of the package was verified."""
        from partita.runtime.verify.replay import replay

        provider = self.resolution.provider
        if provider.ort_name == CPU and manifest.verification.converted_copy is None:
            return manifest.verification
        return replay(folder, (provider,), manifest=manifest, options=self.options)

    def smoke(self, folder: Path, manifest: Manifest) -> SmokeRecord:
        """Open and run a package on the provider, followed by the CPU provider if necessary."""
        from partita.runtime.verify.replay import smoke

        provider = self.resolution.provider
        try:
            return smoke(folder, (provider,), manifest=manifest, options=self.options)
        except ProviderError:
            if provider.ort_name == CPU:
                raise
            return smoke(folder, (provider, *parse_chain("cpu")), manifest=manifest, options=self.options)


def supported_by_cpu(questions: Sequence[Question]) -> list[bool]:
    """Whether the CPU provider supports each of these nodes, for a package without a target."""
    from partita.runtime.ort.registry import available_ort_names

    (cpu,) = parse_chain("cpu")
    return ProviderRuns(resolve_one(cpu, available_ort_names(), {})).supports(questions)
