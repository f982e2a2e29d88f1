"""Execution providers: which of them run here, and which operators one of them supports (measured)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import partita
from partita.errors import PackageError, ProviderError, UsageError
from partita.library.api import QUIET, Audience, from_fields
from partita.library.chain import read_chain
from partita.machine import MachineReport
from partita.messages import did_you_mean, nearest
from partita.observations.text_format import listing
from partita.options.fields import PathText
from partita.options.groups import ProviderChain
from partita.options.inspection import ProvidersOptions
from partita.options.placement import SupportOptions
from partita.package.folder import check_folder
from partita.providers.base import Provider
from partita.providers.cuda import PROVIDER as CUDA
from partita.providers.cuda_dry_run.stub_build import dry_environment
from partita.providers.options import parse_libraries
from partita.providers.resolve import Resolution, all_names, resolve_one
from partita.support.records import ProviderFacts, SupportTable, Versions

ONNX_DOMAINS = ("", "ai.onnx")
GRAPHS = ("model.onnx", "decode.onnx")
"""Graph files of a package, in order of preference."""
TITLE = "testing operators on the provider (Ctrl-C: partial table)"


@from_fields(SupportOptions)
def support(options: SupportOptions) -> SupportTable:
    """Which operators a provider supports, measured: opset versions, types, attribute and input variants.

    Raises ArgumentError, PackageError for an unreadable model, and ProviderError for a provider that cannot be tested.
    """
    found, interrupted = measure_support(options)
    if interrupted:
        raise KeyboardInterrupt
    return found


def measure_support(options: SupportOptions, audience: Audience = QUIET) -> tuple[SupportTable, bool]:
    """The table, and whether Ctrl-C interrupted it. Raises UsageError, PackageError, ProviderError."""
    names = (options.operators,) if isinstance(options.operators, str) else tuple(options.operators or ())
    if names and options.model is not None:
        raise UsageError("name operators (e.g. Cast, com.microsoft:MatMulNBits), a `model`, or `all`; use exactly one")
    if options.device is not None and not options.dry_run:
        raise UsageError("`device` needs a dry run; add `dry_run=True`")
    if options.dry_run and options.provider is None:
        raise UsageError("`dry_run=True` needs `provider=cuda`: only CUDA can be tested without its device")
    given, libraries = options.provider_options, options.provider_libraries
    target = read_chain(ProviderChain(options.provider, provider_options=given, provider_libraries=libraries))
    provider = target.chain[0]
    if target.by_default is None and len(target.chain) != 1:
        raise UsageError(f"`provider={target.name}`: name one provider; a support table covers exactly one")
    if options.dry_run and provider.ort_name != CUDA.ort_name:
        raise UsageError(f"`dry_run=True` is for CUDA: `provider` must be cuda, not {provider.name}")
    task, scope = _measurement_task(names, options.model)

    from partita.runtime.lab.tables import measure
    from partita.runtime.ort.registry import available_ort_names
    from partita.support.build import build_table

    settings = target.options.get(provider.name, {})
    environment: dict[str, str] | None = None
    played: str | None = None
    devices: tuple[str, ...] = ()
    if options.dry_run:
        environment, played = dry_environment(options.device)
        resolution = resolve_one(provider, (provider.ort_name,), settings)
    else:
        resolution, devices = _usable(resolve_one(provider, available_ort_names(), settings))
    with audience.busy(TITLE):
        measured = measure(resolution, task, options.seconds, environment)
    if measured.unusable:
        raise ProviderError(f"{provider.name}: it could not be tested: {measured.unusable}")
    table = build_table(
        measured,
        provider=ProviderFacts.copy_of(
            provider,
            plugin=str(resolution.library) if resolution.library else None,
            options=dict(resolution.options),
            device=played,
            devices=devices,
        ),
        versions=_versions(provider, measured.newest_opset),
        scope=scope,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partita_version=partita.__version__,
        budget_seconds=options.seconds,
        notes=("interrupted: the table is incomplete",) if measured.interrupted else (),
    )
    return table, measured.interrupted


def _measurement_task(names: Sequence[str], model: PathText | None) -> tuple[Mapping[str, Any], str]:
    """The worker's task, and its description for the table. Raises UsageError, PackageError."""
    if model is not None:
        path = _graph_of(Path(model))
        from partita.runtime.place.onnx_model import read_onnx

        read_onnx(path)  # errors of the file are raised here, not in a worker
        return {"model": str(path.resolve())}, f"operators of {Path(model).name}"
    if not names:
        return {"operators": None}, "all operators"
    found = [pair for name in names for pair in _named(name)]
    return {"operators": [list(pair) for pair in found]}, ", ".join(names)


def _graph_of(path: Path) -> Path:
    """The graph of a package, or the file itself. Raises PackageError."""
    if not path.is_dir():
        return path
    check_folder(path)
    found = next((path / name for name in GRAPHS if (path / name).is_file()), None)
    if found is None:
        raise PackageError(f"{path}: contains no {listing(GRAPHS)}; choose an ONNX file, or an exported package")
    return found


def _named(name: str) -> list[tuple[str, str]]:
    """Operators of that name, ignoring case, as (domain, name); with a domain only its own. Raises UsageError."""
    from partita.runtime.lab.schema import operators

    domain, colon, word = name.rpartition(":")
    domain = "" if domain in ONNX_DOMAINS else domain
    known = dict.fromkeys((entry.domain, entry.name) for entry in operators())
    fitting = [
        pair for pair in known if pair[1].lower() == word.lower() and (not colon or pair[0].lower() == domain.lower())
    ]
    if not fitting:
        spelled = [f"{pair[0]}:{pair[1]}" if pair[0] else pair[1] for pair in known]
        hint = did_you_mean(nearest(name, spelled, 0.5)).strip() or "operators are named as in ONNX files, e.g. MatMul"
        raise UsageError(f"operator {name!r} is unknown; {hint}")
    return fitting


def _usable(resolution: Resolution) -> tuple[Resolution, tuple[str, ...]]:
    """The provider as it started in a worker process, and its devices as text. Raises ProviderError."""
    from partita.runtime.chain.provider_check import check

    (tried,) = check([resolution])
    if not tried.usable:
        found = tried.resolution
        dry = "; or add `dry_run=True`, without a GPU" if resolution.provider is CUDA else ""
        raise ProviderError(
            f"{resolution.provider.name}: it cannot be tested here: {found.reason}: {found.evidence}; "
            f"{found.remedy}{dry}"
        )
    software = " (the CPU in place of a GPU)" if tried.software else ""
    words = tuple(f"{device.kind} of {device.vendor or 'unknown vendor'}{software}" for device in tried.devices)
    return tried.resolution, words


def _versions(provider: Provider, opset: int | None) -> Versions:
    """Versions of everything that an outcome may depend on; the wheels are ONNX Runtime's and the provider plugin's."""
    from partita.runtime.machine import environment, plugin_wheels

    found = environment()
    wheels = [f"{wheel.name} {wheel.version}" for wheel in found.onnxruntime_wheels]
    wheels += [f"{name} {version}" for name, version in plugin_wheels([provider]).items()]
    return Versions.copy_of(
        found,
        onnxruntime=found.onnxruntime_version,
        onnxruntime_package=", ".join(wheels),
        onnx=found.packages.get("onnx", ""),
        opset=opset,
    )


@from_fields(ProvidersOptions)
def providers(options: ProvidersOptions) -> MachineReport:
    """Check every execution provider in a worker process, with the reasons for unusable providers; takes seconds.

    `provider_libraries`: files of plugin providers by name. `measure`: measure the rates of this machine, which takes
    ten seconds. Raises ArgumentError for an invalid library file.
    """
    from partita.library.planning import here_rates, stored_rates
    from partita.runtime.machine import describe_machine

    found = describe_machine(parse_libraries(options.provider_libraries or {}, all_names()))
    rates = here_rates(again=True) if options.measure else stored_rates()
    return found.model_copy(update={"rates": rates})
