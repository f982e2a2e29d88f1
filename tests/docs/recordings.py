"""What was recorded for the pages: facts of runs, from which reports are built anew, and results of verbs.

`recorded/*.json.gz`, of 2026-11-22 and 23. `python -m tests.docs.recordings [NAMES]`, from the repository, makes most
anew: exports, the known answer, the quality of int4, and dry runs, in the main environment. `fp32` and `fp16`:
dry runs of CUDA as an H100 (`partita place package --provider cuda,cpu --dry-run --device h100`) of the embedded
checkpoint in gqa, with onnxruntime-gpu 1.31.1. `webgpu`: `partita generate` of a random 2-layer llama in onnx24, of a
graph that is not fused, on WebGPU over SwiftShader, with onnxruntime-webgpu 1.27.0; `refused`: the embedded checkpoint
in onnx24 there, without the CPU provider. The others are what `--json` of a verb printed. Facts are kept, not reports,
so that every sentence is the present one. A field that is added to the facts without a default has to be added here,
too.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from partita.bench.contenders import sentences
from partita.bench.records import Bench
from partita.check.gate import exceeded_limits
from partita.check.requirements import Limits
from partita.commands import results
from partita.drift.records import Drift
from partita.export.publish import ExportResult
from partita.machine import MachineReport
from partita.observations.codes import ReasonCode
from partita.observations.facts import RunFacts, SessionFacts
from partita.observations.records import ChainEntry, Environment, PackageFacts
from partita.package.records import Evaluation, Verification
from partita.partition_reports.build import build_report
from partita.partition_reports.records import DryRunFacts, Report, Request
from partita.providers.base import Provider
from partita.providers.resolve import Failure, Resolution, failure, known_providers, parse_chain
from partita.runtime.chain.open_chain import ChainError, not_all_on
from tests.conftest import DEMO_CHECKPOINT, REPOSITORY

RECORDED = Path(__file__).parent / "recorded"
NAMES = {
    *("fp32", "fp16", "webgpu", "refused", "providers", "verify", "bench"),
    *("evaluate", "export_int4", "drift"),
    *("export_demo", "export_onnx24", "export_cuda", "export_webgpu"),
}
"""Every recording."""


def raw(name: str) -> dict[str, Any]:
    """A recording, as JSON."""
    found: dict[str, Any] = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    return found


def at_present(session: SessionFacts) -> SessionFacts:
    """The session with what its providers' files say now of their logs."""
    for provider in known_providers().values():
        if provider.ort_name in session.providers:
            session = session.with_provider(provider.ort_name, patterns=provider.node_patterns)
    return session


@cache
def report(name: str) -> Report:
    """The report of recorded facts."""
    return rebuilt(raw(name))


def rebuilt(found: dict[str, Any]) -> Report:
    """The report of facts and what else was recorded of a run, built anew."""
    facts = TypeAdapter(RunFacts).validate_python(found["facts"])
    return build_report(
        replace(facts, sessions=tuple(map(at_present, facts.sessions))),
        environment=Environment.model_validate(found["environment"]),
        package=found["package"] and PackageFacts.model_validate(found["package"]),
        request=Request.model_validate(found["request"]),
        model=found.get("model"),
        chain=tuple(ChainEntry.model_validate(entry) for entry in found["chain"]),
        created=found.get("created", "2026-11-30T00:00:00Z"),
        partita_version="0.1.0",
        device=found["played"] and DryRunFacts.model_validate(found["played"]),
        judge=lambda report: exceeded_limits(report, Limits()),
    )


def refused() -> ChainError:
    """The error for the embedded checkpoint in onnx24 on WebGPU alone."""
    facts = at_present(TypeAdapter(SessionFacts).validate_python(raw("refused")["facts"]))
    (webgpu,) = parse_chain("webgpu")
    return not_all_on(Path("tiny/model.onnx"), (Resolution(webgpu, "active"),), facts)


def machine() -> MachineReport:
    """What `partita providers` found with onnxruntime-gpu on a machine without a GPU, with the present remedies."""
    found = MachineReport.model_validate(raw("providers"))
    known = known_providers()
    entries = tuple(
        entry
        if entry.reason is None
        else entry.model_copy(update={"remedy": str(why_not(known[entry.name], entry.reason, entry.evidence).remedy)})
        for entry in found.providers
    )
    return found.model_copy(update={"providers": entries})


def why_not(provider: Provider, reason: str, evidence: str | None) -> Failure:
    """The failure of a provider, with its present remedy."""
    return failure(provider, cast("ReasonCode", reason), evidence or "")


def exported(name: str) -> ExportResult:
    """What an export did."""
    found = results.ExportResult.model_validate(raw(name))
    return ExportResult(
        path=Path(found.package),
        manifest=found.manifest,
        attention_reason=found.attention_reason,
        passes=found.passes,
        seconds=found.seconds,
        peak_rss_bytes=found.peak_rss_bytes,
        notes=found.notes,
    )


def drifted() -> Drift:
    """The recorded `partita drift` of the embedded checkpoint on WebGPU over SwiftShader."""
    return Drift.model_validate(raw("drift"))


def verified() -> Verification:
    """The known answer of the embedded checkpoint, replayed on the CPU."""
    found = raw("verify")
    return Verification.model_validate({name: found[name] for name in Verification.model_fields if name in found})


def evaluated() -> Evaluation:
    """The embedded checkpoint in int4 beside its original, on the CPU."""
    found = raw("evaluate")
    return Evaluation(**{name: found[name] for name in Evaluation.model_fields})


def bench() -> Bench:
    """What `partita bench` measured, with the present verdict."""
    found = Bench.model_validate(raw("bench"), extra="ignore")
    return found.model_copy(update={"verdict": sentences(found.contenders, found.baseline)})


# Recording


EXPORT = f"export {DEMO_CHECKPOINT} {{}} --force"
DRY = "place package --provider cuda,cpu --dry-run --device h100"
COMMANDS: dict[str, tuple[str, ...]] = {
    "export_demo": (EXPORT.format("build/demo/package"),),
    "export_onnx24": (EXPORT.format("package-onnx24 --attention onnx24"),),
    "export_int4": (EXPORT.format("package-int4 --precision int4"),),
    "export_cuda": (EXPORT.format("build/for-cuda --target cuda"),),
    "fp32": (EXPORT.format("package"), DRY),
    "fp16": (EXPORT.format("package --precision fp16"), DRY),
    "evaluate": (EXPORT.format("package-int4 --precision int4"), "evaluate package-int4 --provider cpu"),
    "verify": (EXPORT.format("package"), "verify package --provider cpu"),
}
"""Commands of each recording. Recorded is what the last one prints with --json; of a dry run, its facts."""


def record(name: str) -> None:
    """Make one recording anew, in the current folder; the same facts are the same bytes. Raises KeyError for others."""
    facts = Path("facts.json").absolute()
    paths = f"{REPOSITORY / 'tests' / 'recordings' / 'site'}{os.pathsep}{REPOSITORY}"
    Path("build/demo").mkdir(parents=True, exist_ok=True)
    for line in COMMANDS[name]:
        command = [sys.executable, "-m", "partita", *line.split(), "--json"]
        variables = {**os.environ, "PYTHONPATH": paths, **({"PARTITA_RECORD_TO": str(facts)} if line == DRY else {})}
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables).stdout
    found = json.loads(facts.read_text("utf-8") if DRY in COMMANDS[name] else printed)
    text = json.dumps(found, separators=(",", ":"), sort_keys=True)
    (RECORDED / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Record what is named, or everything that this environment can."""
    for name in sys.argv[1:] or COMMANDS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            record(name)
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
