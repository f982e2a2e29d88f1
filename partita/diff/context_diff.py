"""Differences of machine, versions, model, request and outcome between two reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partita.diff.records import Change
from partita.observations.text_format import short_provider
from partita.partition_reports.cache_state import is_in_place, status_of
from partita.partition_reports.records import Cache, Check, Report
from partita.partition_reports.verdict import cache_text

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
    "disagreements": "conflicting sources",
    "rejected": "rejected by the provider",
}
"""Key -> displayed name, where they differ."""


def changes_around(before: Report, after: Report) -> tuple[Change, ...]:
    """Changes other than of nodes, in the order of a report."""
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
class TextWithData:
    """A text with its data; texts with equal data are equal."""

    text: str
    data: object

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed consistency checks. Reports without keys of checks are compared by name."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        return "; ".join(check.name for check in self.checks)

    def is_as(self, other: Failed) -> bool:
        """Whether the same checks failed."""
        keyed = all(check.key for check in (*self.checks, *other.checks))
        ours, theirs = (
            [(check.part, check.key) if keyed else check.name for check in each.checks] for each in (self, other)
        )
        return ours == theirs


def _shown(value: object) -> str | None:
    return None if value is None else str(value)


def _differ(before: object, after: object) -> bool:
    """Whether the data of two values differ."""
    if isinstance(before, TextWithData) and isinstance(after, TextWithData):
        return before.data != after.data
    if isinstance(before, Failed) and isinstance(after, Failed):
        return not before.is_as(after)
    return _shown(before) != _shown(after)


def state(report: Report) -> Iterator[tuple[tuple[str, str], object]]:
    """Facts of a report about the run, without figures and values that differ in every run."""
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
    """Software and machine, without memory, which differs between equal machines."""
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
    """The package."""
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
    """The model that is not a package."""
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
    """The user's request."""
    request = report.request
    return {
        "verb": request.verb,
        "chain": ",".join(short_provider(name) for name in request.chain),
        **{f"option {name}": value for name, value in request.options.items()},
        "threads": request.threads,
        "prompt_tokens": request.prompt_tokens,
        "max_new_tokens": request.max_new_tokens,
        "prefill_chunk_tokens": request.prefill_chunk_tokens,
        "runs": request.runs,
        "phases": ", ".join(phase.name for phase in report.phases),
    }


def _chain(report: Report) -> Mapping[str, object]:
    """Availability of each provider."""
    return {entry.provider: f"{entry.status}{f': {entry.reason}' if entry.reason else ''}" for entry in report.chain}


def _cache_state(cache: Cache) -> TextWithData:
    """Memory of the cache, and whether it stayed in place."""
    status = status_of(cache)
    memories = tuple(sorted(cache.memories))
    moved = (cache.states - cache.in_place_states, cache.address_changes)
    text = "no cache" if status == "no_cache" else cache_text(cache)
    return TextWithData(text, (status, cache.states, cache.size_bytes, memories, moved))


def _dry_run(report: Report) -> Mapping[str, object]:
    """The simulated device."""
    played = report.dry_run
    if played is None:
        return {}
    return {
        "device": played.device,
        "provider_library": f"{played.provider_library} of ONNX Runtime {played.onnxruntime_version}",
        "cuda_version": played.cuda_version,
    }


def _outcome(report: Report) -> Mapping[str, object]:
    """Problems of the run or the report."""
    failed = tuple(check for check in report.checks if not check.passed)
    lost = [f"{', '.join(part.nodes)} ({part.file})" for part in report.rejected]
    return {
        "checks_failed": Failed(failed) if failed else None,
        "limits_exceeded": len(report.exceeded) or None,
        "disagreements": len({entry.node for entry in report.disagreements}) or None,
        "rejected": "; ".join(lost) or None,
    }
