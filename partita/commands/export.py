"""`partita export` exports, replays the known answer in the runtime, prints the summary; `partita push` uploads."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import partita
from partita import dtypes
from partita.commands import results
from partita.commands.terminal import TERMINAL, Bars, busy, draws_progress, note, print_record, write_stdout
from partita.dtypes import EXACT
from partita.errors import UsageError
from partita.export.hub import HUB_ID, upload
from partita.export.publish import ExportResult
from partita.inspection.document import adapter_text
from partita.library.exporting import run_export
from partita.observations.text_format import human_bytes, nats, plural
from partita.options.export import ExportCommand, PushCommand
from partita.options.fields import with_flags
from partita.package.folder import Manifest, check_files, read_manifest
from partita.package.records import PackedKind

LONG_STAGES = 3
"""The summary has the times of this many of the longest stages."""
TARGET_TEXTS = {
    "verified": "verified there",
    "unverified": "NOT verified there",
    "ran": "opened and ran there, not verified",
    "failed": "fails there",
    "not_run": "not run there",
}
LABEL = 14
"""Width of the labels of the summary."""


def run(options: ExportCommand) -> None:
    """Export and print the summary, with `explain` also the passes over the graph; `quiet` prints notes only."""
    with Bars() as bars:
        summary = run_export(options, bars, TERMINAL)
    for line in summary.notes:
        note(f"note: {line}")
    if options.as_json:
        print_record(_as_record(summary))
    elif not options.quiet:
        lines: list[str] = []
        for each in summary.variants or (summary,):
            lines += describe(each, variant=bool(summary.variants))
            if options.explain:
                lines += pass_lines(each.passes, each.manifest)
        write_stdout(with_flags("\n".join(lines)) + "\n")


def _cache_bytes_per_token(manifest: Manifest) -> int:
    """Bytes of keys and values per token and row, in layers that cache every token."""
    graph = manifest.graph
    return (graph.cache_bytes - _fixed_state_bytes(manifest)) // (graph.batch_size * graph.max_length)


def _fixed_state_bytes(manifest: Manifest) -> int:
    """States whose size is independent of the number of tokens."""
    states = [state for state in manifest.graph.states if state.kind not in ("key", "value") or state.rolling]
    return sum(dtypes.size_bytes(state.dtype, state.shape) for state in states)


def _as_record(summary: ExportResult) -> results.ExportResult:
    """The summary for `--json`."""
    return results.ExportResult.copy_of(
        summary,
        package=str(summary.path),
        cache_bytes_per_token=_cache_bytes_per_token(summary.manifest),
        fixed_state_bytes=_fixed_state_bytes(summary.manifest),
        seconds={name: round(value, 3) for name, value in summary.seconds.items()},
        variants=tuple(each.manifest for each in summary.variants),
    )


def describe(summary: ExportResult, *, variant: bool = False) -> list[str]:
    """The summary as text. `variant`: of one target of a model package."""
    manifest, checked = summary.manifest, summary.manifest.verification
    copy = ""
    if checked.converted_copy is not None:  # verified in place of the package
        packed = manifest.packed
        half = packed is not None and packed.activations == "fp16" and checked.proof is None
        copy = f" with the same graph in {'float16' if half else 'float32'}"
    rows = [
        *_model(manifest, summary.attention_reason),
        *_weights(manifest),
        *_cache(manifest),
        *_checks(manifest),
        *_costs(summary, variant=variant),
    ]
    head = f"{summary.path}: {manifest.source.architecture} exported, {checked.headline}{copy}"
    return [head, *(f"  {label:<{LABEL - 3}} {text}" for label, text in rows)]


def _model(manifest: Manifest, attention_reason: str) -> Iterator[tuple[str, str]]:
    """Model and graphs."""
    source, graph = manifest.source, manifest.graph
    yield "model", f"{source.model_type}, {source.parameters:,} parameters, {source.dtype} -> {graph.precision}"
    if (found := source.quantised) is not None:
        weights = f"{plural(found.weights, 'weight')} of the checkpoint, with {found.method}"
        yield "quantised", f"{weights}: {found.conversion}; the unquantised model is unknown"
    yield "graph", "; ".join(f"{file.file}: {file.nodes:,} nodes" for file in graph.files)
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph.opsets.items())
    yield "attention", f"{graph.attention} ({attention_reason}); opset {opsets}"


def _weights(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Weights: precisions and the operators that read them, and adapters."""
    packed, size = manifest.packed, human_bytes(manifest.graph.weight_bytes)
    if packed is None:
        yield "weights", size
    else:
        kinds = "; ".join(map(_kind_text, packed.kinds))
        yield "weights", f"{size}: {kinds}; read by {packed.operators}, activations {packed.activations}"
    for record in manifest.adapters:
        use = "merged into the weights" if record.file is None else f"for --adapter {record.name}"
        yield "adapter", f"{adapter_text(record).partition(';')[0]}; {use}"


def _kind_text(kind: PackedKind) -> str:
    """Weights that are quantised alike."""
    scales = f"blocks of {kind.block_size}" if kind.block_size else "one scale per row"
    points = f"{'with' if kind.zero_points else 'without'} zero points, {kind.quantiser}"
    bits = f"{8 * kind.size_bytes / kind.parameters:.2f} bits per weight"
    return f"{plural(kind.weights, 'weight')} in {kind.precision}, {scales}, {points}, {bits}"


def _cache(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Size of the cache and its bytes per token."""
    graph, fixed = manifest.graph, _fixed_state_bytes(manifest)
    windows = sorted({state.window for state in graph.states if state.window is not None})
    parts = [f"{_cache_bytes_per_token(manifest):,} bytes per token"] if graph.cache_bytes > fixed else []
    parts += [f"{human_bytes(fixed)} independent of the length"] if fixed else []
    parts += [f"batch {graph.batch_size}", f"{graph.max_length:,} tokens"]
    parts += [f"window {', '.join(map(str, windows))}"] if windows else []
    if (cache := manifest.quantised_cache) is not None:
        parts.append(f"{plural(cache.states, 'state')} in {cache.dtype}")
    yield "cache", f"{human_bytes(graph.cache_bytes)}: {', '.join(parts)}"


def _checks(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Verification, quality loss, smoke runs that the verification does not cover, and the target."""
    checked, target = manifest.verification, manifest.target
    yield "verified", f"{'yes' if checked.status == 'verified' else 'no'}: {checked.detail}"
    yield from (("quality", text) for text in quality_texts(manifest))
    for entry in manifest.smoke:
        if not entry.replayed:
            yield "smoke run", f"{entry.chain}: {entry.status.replace('_', ' ')}, {entry.detail}"
    if target is not None:
        smoke = next((entry.status for entry in manifest.smoke if entry.chain == target.provider), "not_run")
        verified = TARGET_TEXTS[smoke if target.verification == "not_run" else target.verification]
        chosen = f"{target.provider} ({target.source.partition(':')[0]})"
        yield "target", f"{chosen}, probed {target.probe_method}; {verified}"


def _costs(summary: ExportResult, *, variant: bool) -> Iterator[tuple[str, str]]:
    """Time and memory of the export, and a command that uses the package."""
    longest = sorted(summary.seconds.items(), key=lambda item: -item[1])[:LONG_STAGES]
    stages = ", ".join(f"{name} {value:.1f}" for name, value in longest)
    total = f"{sum(summary.seconds.values()):.1f} s ({stages})"
    yield "took", f"{total}; peak memory {human_bytes(summary.peak_rss_bytes)}"
    prompt = "1,2,3 --token-ids" if summary.manifest.tokenizer == "none" else '"Once upon a time"'
    out, target = shlex.quote(str(summary.path)), summary.manifest.target
    if variant and target is not None:
        yield "next", f"partita place {out} --provider {target.provider}"
    else:
        yield "next", f"partita generate {out} {prompt}"


def pass_lines(passes: Mapping[str, int], manifest: Manifest) -> list[str]:
    """A line for each pass over the graph: number of changes and description; then for changed weights."""
    from partita.export.passes import ORDER

    if not passes:
        return ["  passes      none: the graphs come from another exporter"]
    without = manifest.graph.without_passes
    summaries = {**{each.name: each.summary for each in ORDER}, **dict.fromkeys(without, "disabled")}
    summaries |= dict.fromkeys(passes.keys() - summaries.keys(), "")
    width = max(map(len, summaries))
    rows = [f"    {passes.get(name, 0):>5} {name:<{width}}  {text}".rstrip() for name, text in summaries.items()]
    return ["  passes      changes made by each pass over the graph, in order", *rows]


def quality_texts(manifest: Manifest) -> list[str]:
    """Sentences on the quality loss; empty without quantisation."""
    found = manifest.quality
    if found is None:
        unknown = manifest.graph.precision != EXACT.name and manifest.verification.status == "unverified"
        return ["not measured: the source model was not run"] if unknown else []
    other = "the source model's" if manifest.source.quantised is None else "the stored weights'"
    return [
        f"perplexity {found.perplexity:.3f}, {other} {found.original_perplexity:.3f}: ratio "
        f"{found.perplexity_ratio:.4f}; same best token {found.top1_agreement:.1%}; KL divergence "
        f"{nats(found.kl_mean)}, 99th percentile {nats(found.kl_p99, 3)} ({found.tokens:,} tokens of {found.text}, on "
        f"{found.provider}{'' if found.converted_copy is None else f': {found.converted_copy}'})",
        *(
            f"{each.phase}: ratio {each.perplexity_ratio:.4f}; same best token {each.top1_agreement:.1%}; KL "
            f"divergence {nats(each.kl_mean)}"
            for each in found.phases
        ),
    ]


def push(options: PushCommand) -> None:
    """Check the package, upload it, and print the address of the commit.

    Raises PackageError for a damaged package, UsageError for a repository that the hub refuses.
    """
    package, name = Path(options.package), options.repository
    found = HUB_ID.fullmatch(name)
    if found is None or found["name"] != name:
        raise UsageError(f"`repository`: {name!r} is not of the form OWNER/NAME")
    manifest = read_manifest(package)
    check_files(package, manifest, hashes=False)
    source = f"{manifest.source.checkpoint}, {manifest.graph.precision}, Partita {partita.__version__}"
    title = f"uploading {package} to {name}"
    if draws_progress():  # huggingface_hub draws its own bars
        note(title)
    with nullcontext() if draws_progress() else busy(title):
        address = upload(package, name, source, private=options.private)
    write_stdout(f"{address}\n")
