"""Builds the report of a run from its facts and options."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import partita
from partita.check.gate import exceeded_limits
from partita.check.requirements import Limits
from partita.errors import ProviderError
from partita.foreign.folder import Choice
from partita.library.chain import Target
from partita.observations.facts import RunFacts
from partita.observations.names import CPU
from partita.observations.records import ChainEntry, Environment, PackageFacts
from partita.package.folder import Manifest
from partita.partition_reports.build import build_report
from partita.partition_reports.records import DryRunFacts, ModelFacts, Report, Request
from partita.remedies import shell
from partita.runtime.chain.advice import package_facts


def make_report(
    folder: Path,
    manifest: Manifest,
    facts: RunFacts,
    chain: Sequence[ChainEntry],
    environment: Environment,
    request: Request,
    limits: Limits,
) -> Report:
    """The report of one run of a package. Does not load ONNX Runtime: the run may have been in a worker process."""
    from partita.capacity.speed import with_bounds
    from partita.library.planning import measured_requirements

    report = report_run(facts, chain, environment, request, limits, package=package_facts(folder, manifest))
    on_cpu = {entry.provider for entry in report.chain if entry.status == "active"} == {CPU}
    return with_bounds(report, *measured_requirements(folder, manifest, on_cpu=on_cpu), manifest.graph.batch_size)


def report_run(
    facts: RunFacts,
    chain: Sequence[ChainEntry],
    environment: Environment,
    request: Request,
    limits: Limits,
    *,
    package: PackageFacts | None = None,
    model: ModelFacts | None = None,
    device: DryRunFacts | None = None,
) -> Report:
    """The report of one run of a package or of another model; `device`: the simulated device of a dry run."""
    return build_report(
        facts,
        environment=environment,
        package=package,
        model=model,
        device=device,
        judge=lambda report: exceeded_limits(report, limits),
        request=request,
        chain=tuple(chain),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partita_version=partita.__version__,
    )


def option_texts(target: Target, choice: Choice, **several: Sequence[str]) -> dict[str, str]:
    """Options of providers and foreign folders for a report. Repeated values are shell-quoted and joined by blanks."""
    given = {f"{name}.{key}": value for name, pairs in target.options.items() for key, value in pairs.items()}
    libraries = [f"{entry.ort_name}={entry.library}" for entry in target.chain if entry.library is not None]
    lists = {**several, "pin": target.pins, "provider-library": libraries}
    folder = {"variant": choice.variant, "contract": choice.contract, "max-length": choice.max_length}
    given |= {name: shell(values) for name, values in lists.items() if values}
    return given | {name: str(value) for name, value in folder.items() if value is not None}


def limits_error(report: Report) -> ProviderError | None:
    """The error for limits that a report exceeds; None if it meets all."""
    return ProviderError("; ".join(report.exceeded_limits)) if report.exceeded_limits else None
