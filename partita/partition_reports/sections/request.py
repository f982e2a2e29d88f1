"""The request (package or model, command, chain, options) and the availability of each provider of the chain."""

from __future__ import annotations

from collections.abc import Iterator

from partita.observations.records import ChainEntry, PackageFacts
from partita.observations.text_format import families, nats, plural
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import ModelFacts, ModelInput, Request
from partita.partition_reports.sections.model import Pairs, Section

Pair = tuple[str, tuple[str, ...]]


def section(report: Report) -> Section:
    """The request."""
    return Section("request", "Request", (Pairs("Request", tuple(_pairs(report))),))


def _pairs(report: Report) -> Iterator[Pair]:
    """Package or model, request and chain."""
    request = report.request
    if report.package is not None:
        yield from _describe_package(report.package)
    if report.model is not None:
        yield from _describe_model(report.model)
    if request.path is not None:
        yield "path", (request.path,)
    yield "command", (_describe_command(request),)
    chain = f"{', '.join(request.chain) or 'none'} ({request.chain_source})"
    yield "chain", (chain, *(text for entry in report.chain for text in _describe_entry(entry)))
    yield "threads", ("one per usable core" if request.threads is None else str(request.threads),)
    if request.prefill_chunk_tokens is not None:
        yield "prefill", (f"in chunks of {plural(request.prefill_chunk_tokens, 'token')}",)
    if request.options:
        yield "options", (", ".join(f"{name}={value}" for name, value in request.options.items()),)
    if request.limits:
        yield "limits", (", ".join(f"{name} {value:,}" for name, value in request.limits.items()),)


def _describe_package(package: PackageFacts) -> Iterator[Pair]:
    """The package that was run."""
    yield (
        "package",
        (
            f"{package.name}: {package.model_type}, {package.precision}, attention {package.attention}",
            f"batch {package.batch_size}, max length {package.max_length}, manifest {package.manifest_sha256[:12]}",
        ),
    )
    yield "verification", (f"{package.verification}: {package.verification_detail}",)
    if package.omitted:
        yield "omitted", (package.omitted,)
    if (found := package.quality) is not None:
        yield (
            "quality",
            (
                f"perplexity {found.perplexity_ratio:.4f} times that of the source model; same best token "
                f"{found.top1_agreement:.1%}; KL divergence {nats(found.kl_mean)}, 99th percentile "
                f"{nats(found.kl_p99, 3)}",
                f"at export: {plural(found.tokens, 'token')} of {found.text}, on {found.provider}",
                *([found.twin] if found.twin is not None else []),
            ),
        )


def _describe_model(model: ModelFacts) -> Iterator[Pair]:
    """The ONNX file and its inputs."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items())
    about = f"{model.file}: {plural(model.nodes, 'node')}, opset {opsets}, sha256 {model.sha256[:12]}"
    yield "model", (about, *([f"weights in {', '.join(model.data_files)}"] if model.data_files else []))
    yield "inputs", tuple(_describe_inputs(model.inputs)) or ("none",)


def _describe_inputs(ports: tuple[ModelInput, ...]) -> Iterator[str]:
    """Inputs with type and shape; names that differ only in numbers share a line."""
    alike: dict[str, list[str]] = {}
    for port in ports:
        alike.setdefault(port.declared, []).append(port.name)
    found = {
        members[0]: f"{name} {kind}" + (f" ({plural(len(members), 'input')})" if len(members) > 1 else "")
        for kind, names in alike.items()
        for name, members in families(names).items()
    }
    yield from (found[port.name] for port in ports if port.name in found)


def _describe_command(request: Request) -> str:
    """The command and the requested amount of work."""
    parts = [request.verb]
    if request.prompt_tokens is not None:
        parts.append(plural(request.prompt_tokens, "prompt token"))
    if request.max_new_tokens is not None:
        parts.append(f"up to {request.max_new_tokens} new tokens")
    if request.runs is not None:
        parts.append(f"{plural(request.runs, 'run')} per phase on generated inputs")
    return ", ".join(parts)


def _describe_entry(entry: ChainEntry) -> Iterator[str]:
    """Availability of a provider, with the remedy if it is unavailable."""
    if entry.status == "active":
        yield f"{entry.provider} active"
        return
    reason, evidence = entry.reason or "no reason known", entry.evidence or "no evidence"
    yield f"{entry.provider} {entry.status}: {reason}; {evidence}"
    if entry.remedy:
        yield f"remedy: {entry.remedy}"
