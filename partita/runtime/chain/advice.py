"""Remedies for packages and models that a provider chain refuses: `partita export` commands without fallbacks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

from partita.diagnosis.reasons import steps_of
from partita.diagnosis.records import Fallback
from partita.diagnosis.steps import RETARGET, Situation, steps_for
from partita.errors import PackageError, ProviderRefusal, RefusedNode
from partita.observations.records import PackageFacts, PackageQuality
from partita.package.folder import MANIFEST, Manifest, not_exported, read_manifest, sha256_of
from partita.remedies import Remedy

ALLOW_CPU = Remedy("append cpu to the chain to allow CPU fallback", options=("--provider", "{chain},cpu"))


def package_facts(folder: Path, manifest: Manifest) -> PackageFacts:
    """The report's record of the package that was run."""
    graph, verification = manifest.graph, manifest.verification
    if manifest.foreign is None:
        identity = sha256_of(folder / MANIFEST)
    else:
        identity = hashlib.sha256(manifest.model_dump_json(by_alias=True).encode()).hexdigest()
    return PackageFacts.copy_of(
        graph,
        name=folder.resolve().name,
        manifest_sha256=identity,
        model_type=manifest.source.model_type,
        verification=verification.status,
        verification_detail=verification.detail,
        checkpoint=manifest.source.checkpoint,
        target=manifest.target.provider if manifest.target is not None else "",
        omitted=not_exported(manifest.source.unused),
        quality=None if manifest.quality is None else PackageQuality.copy_of(manifest.quality),
    )


def export_again(graph: Path, codes: Sequence[str], provider: str, *, probing: bool = True) -> Remedy | None:
    """The export command that puts nodes lost for these reasons (most frequent first) on `provider`.

    `probing`: also suggest probing the provider during export, which requires the provider to be installed there.
    Remedies without probing come second. None for a file outside a package, or without a remedy.
    """
    folder = graph.parent
    if not (folder / MANIFEST).is_file():
        return None
    try:
        package = package_facts(folder, read_manifest(folder))
    except PackageError:  # the folder has another program's manifest
        return None
    situation = Situation(package, str(folder), (provider,))
    for code in codes:
        actions = [action for action in steps_for(situation, steps_of(code), provider) if action.step.exports]
        remedies = [(each.step, replace(each.remedy, text=each.title[:1].lower() + each.title[1:])) for each in actions]
        with_probes, certain = (
            next((each for step, each in remedies if (step is RETARGET) is asks), None) for asks in (True, False)
        )
        if with_probes is not None and probing:
            return replace(with_probes, alternative=certain)
        if certain is not None:
            return certain
    return None


def export_again_for(path: Path, nodes: Sequence[RefusedNode]) -> Remedy | None:
    """The export command for the first provider of the chain for which a new export helps; None without one."""
    reasons: dict[str, Counter[str]] = {}
    for entry in (entry for node in nodes for entry in node.available_refusals):
        reasons.setdefault(entry.provider, Counter())[entry.reason] += 1
    found = (export_again(path, [code for code, _ in codes.most_common()], name) for name, codes in reasons.items())
    return next((remedy for remedy in found if remedy is not None), None)


def rows_of(fallbacks: Sequence[Fallback], active: Container[str]) -> tuple[RefusedNode, ...]:
    """Nodes on other providers, as an error carries them. `active`: the available providers of the chain."""
    return tuple(
        RefusedNode(
            node=entry.node,
            op_type=entry.op_type,
            module=entry.module,
            provider=entry.provider,
            refusals=tuple(
                ProviderRefusal(
                    each.provider,
                    each.reason,
                    each.evidence_kind,
                    each.evidence,
                    each.remedy,
                    available=each.provider in active,
                )
                for each in entry.preferred
            ),
        )
        for entry in fallbacks
    )
