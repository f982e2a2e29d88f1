"""The report of a generation: joins the facts of the run with what was asked for, and writes it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import partita
from partita.errors import ReportError
from partita.package import MANIFEST, Manifest, sha256_of
from partita.partition_reports.build import build_report
from partita.partition_reports.facts import RunFacts
from partita.partition_reports.records import ChainEntry, PackageFacts, Report, Request
from partita.partition_reports.views import json as json_view
from partita.providers.resolve import Resolution
from partita.runtime.environment import environment


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for, as far as a report repeats it."""

    verb: str
    chain: tuple[str, ...]
    chain_source: str
    options: Mapping[str, str]
    threads: int | None
    prompt_tokens: int
    max_new_tokens: int
    prefill_chunk_tokens: int


def make_report(
    folder: Path, manifest: Manifest, facts: RunFacts, resolutions: tuple[Resolution, ...], asked: Asked
) -> Report:
    """Build the report of one run."""
    return build_report(
        facts,
        environment=environment(),
        package=package_facts(folder, manifest),
        request=Request(
            verb=asked.verb,
            chain=asked.chain,
            chain_source=asked.chain_source,
            options=dict(asked.options),
            threads=asked.threads,
            prompt_tokens=asked.prompt_tokens,
            max_new_tokens=asked.max_new_tokens,
            prefill_chunk_tokens=asked.prefill_chunk_tokens,
        ),
        chain=tuple(chain_entry(resolution) for resolution in resolutions),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partita_version=partita.__version__,
    )


def check_target(path: Path, package: Path) -> None:
    """Find out before a long run whether its report can be written. Raises ReportError, and so inside the package."""
    if path.resolve().is_relative_to(package.resolve()):
        raise ReportError(f"{path}: inside the package {package}, which a report must not change; choose another place")
    json_view.check_writable(path)


def package_facts(folder: Path, manifest: Manifest) -> PackageFacts:
    """What a report says of the package that was run."""
    graph, verification = manifest.graph, manifest.verification
    return PackageFacts(
        name=folder.resolve().name,
        manifest_sha256=sha256_of(folder / MANIFEST),
        model_type=manifest.source.model_type,
        attention=graph.attention,
        precision=graph.precision,
        batch_size=graph.batch_size,
        max_length=graph.max_length,
        verification=verification.status,
        verification_detail=verification.detail,
    )


def chain_entry(resolution: Resolution) -> ChainEntry:
    """What became of one provider of the chain."""
    return ChainEntry(
        provider=resolution.provider.ort_name,
        status=resolution.status,
        reason=resolution.reason,
        evidence=resolution.evidence,
        remedy=resolution.remedy,
    )
