"""What two reports say about machine, versions, model, request and outcome, and where they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partita.diff.records import Change
from partita.observations.text_format import short_provider
from partita.partition_reports.cache_state import is_in_place, status_of
from partita.partition_reports.records import Cache, Check, Report
from partita.partition_reports.verdict import say_cache

LABELS = {
    "onnxruntime_package": "onnxruntime package",
    "onnxruntime_build": "onnxruntime build",
    "operating_system": "operating system",
    "logical_cores": "logical cores",
    "manifest_sha256": "manifest sha256",
    "model_type": "model type",
    "batch_size": "batch size",
    "max_length": "max length",
    "ir_version": "IR version",
    "file_nodes": "nodes in the file",
    "prompt_tokens": "prompt tokens",
    "max_new_tokens": "max new tokens",
    "prefill_chunk_tokens": "prefill chunk tokens",
    "provider_library": "provider library",
    "cuda_version": "simulated CUDA",
    "checks_failed": "checks failed",
    "limits_exceeded": "limits exceeded",
    "disagreements": "sources disagree on",
    "rejected": "rejected by the provider",
}
"""Keys that are shown under another name; whatever looks for a change goes by its key."""


def changes_around(before: Report, after: Report) -> tuple[Change, ...]:
    """Everything around the nodes that is another one in `after`, in the order of a report."""
    ours, theirs = dict(state(before)), dict(state(after))
    moved = (is_in_place(before.cache) is False) != (is_in_place(after.cache) is False)
    return tuple(
        Change.model_validate(
            {
                "subject": key[0],
                "key": key[1],
                "name": LABELS.get(key[1], key[1]),
                "before": _shown(ours.get(key)),
                "after": _shown(theirs.get(key)),
                "cache_moved": moved and key[0] == "cache",
            }
        )
        for key in dict.fromkeys((*ours, *theirs))
        if _differ(ours.get(key), theirs.get(key))
    )


@dataclass(frozen=True, slots=True)
class Told:
    """A sentence of ours, and the data that it is about: another sentence about the same data is no change."""

    text: str
    data: object

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Failed:
    """Checks that failed. Reports of before checks had keys are compared by their names."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        return "; ".join(check.name for check in self.checks)

    def is_as(self, other: Failed) -> bool:
        """The same checks failed."""
        keyed = all(check.key for check in (*self.checks, *other.checks))
        ours, theirs = (
            [(check.part, check.key) if keyed else check.name for check in each.checks] for each in (self, other)
        )
        return ours == theirs


def _shown(value: object) -> str | None:
    return None if value is None else str(value)


def _differ(before: object, after: object) -> bool:
    """Whether two values are not the same, whatever is said of them."""
    if isinstance(before, Told) and isinstance(after, Told):
        return before.data != after.data
    if isinstance(before, Failed) and isinstance(after, Failed):
        return not before.is_as(after)
    return _shown(before) != _shown(after)


def state(report: Report) -> Iterator[tuple[tuple[str, str], object]]:
    """What a report states about the run, without figures and without what differs from run to run anyway."""
    for subject, values in (
        ("environment", _environment(report)),
        ("package", package(report)),
        ("model", _model(report)),
        ("request", _request(report)),
        ("chain", _chain(report)),
        ("cache", {"cache": _cache_state(report.cache)} if report.cache is not None else {}),
        ("dry_run", _dry_run(report)),
        ("checks", _outcome(report)),
    ):
        for name, value in values.items():
            if value is not None:
                yield (subject, name), value


def _environment(report: Report) -> Mapping[str, object]:
    """Software and machine. Memory is left out: it differs between equal machines."""
    env = report.environment
    return {
        "onnxruntime": env.onnxruntime_version,
        "onnxruntime_package": ", ".join(wheel.name for wheel in env.onnxruntime_wheels),
        "onnxruntime_build": env.onnxruntime_build,
        **env.packages,
        "partita": report.partita_version,
        "python": env.python,
        "operating_system": env.operating_system,
        "processor": env.cpu,
        "logical_cores": env.logical_cores,
    }


def package(report: Report) -> Mapping[str, object]:
    """What was run, when it is a package."""
    facts = report.package
    if facts is None:
        return {}
    return {
        "name": facts.name,
        "manifest_sha256": facts.manifest_sha256[:12],
        "model_type": facts.model_type,
        "attention": facts.attention,
        "precision": facts.precision,
        "batch_size": facts.batch_size,
        "max_length": facts.max_length,
        "verification": facts.verification,
    }


def _model(report: Report) -> Mapping[str, object]:
    """What was run, when it is no package."""
    facts = report.model
    if facts is None:
        return {}
    return {
        "file": facts.file,
        "sha256": facts.sha256[:12],
        "ir_version": facts.ir_version,
        **{f"opset {domain or 'ai.onnx'}": version for domain, version in facts.opsets.items()},
        "file_nodes": facts.nodes,
        **{f"input {port.name}": port.declared for port in facts.inputs},
    }


def _request(report: Report) -> Mapping[str, object]:
    """What the user asked for."""
    asked = report.request
    return {
        "verb": asked.verb,
        "chain": ",".join(short_provider(name) for name in asked.chain),
        **{f"option {name}": value for name, value in asked.options.items()},
        "threads": asked.threads,
        "prompt_tokens": asked.prompt_tokens,
        "max_new_tokens": asked.max_new_tokens,
        "prefill_chunk_tokens": asked.prefill_chunk_tokens,
        "runs": asked.runs,
        "phases": ", ".join(phase.name for phase in report.phases),
    }


def _chain(report: Report) -> Mapping[str, object]:
    """What became of each provider."""
    return {entry.provider: f"{entry.status}{f': {entry.reason}' if entry.reason else ''}" for entry in report.chain}


def _cache_state(cache: Cache) -> Told:
    """Where the cache is and whether it stayed there."""
    status = status_of(cache)
    memories = tuple(sorted(cache.memories))
    moved = (cache.states - cache.in_place_states, cache.address_changes)
    text = "no cache" if status == "no_cache" else say_cache(cache)
    return Told(text, (status, cache.states, cache.size_bytes, memories, moved))


def _dry_run(report: Report) -> Mapping[str, object]:
    """The device that was played."""
    played = report.dry_run
    if played is None:
        return {}
    return {
        "device": played.device,
        "provider_library": f"{played.provider_library} of ONNX Runtime {played.onnxruntime_version}",
        "cuda_version": played.cuda_version,
    }


def _outcome(report: Report) -> Mapping[str, object]:
    """What was wrong with the run or the report."""
    failed = tuple(check for check in report.checks if not check.passed)
    lost = [f"{', '.join(part.nodes)} ({part.file})" for part in report.rejected]
    return {
        "checks_failed": Failed(failed) if failed else None,
        "limits_exceeded": len(report.exceeded) or None,
        "disagreements": len({entry.node for entry in report.disagreements}) or None,
        "rejected": "; ".join(lost) or None,
    }
