"""`partita export`: joins the exporter with the runtime that replays its known answer, and prints the summary."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from partita.commands.audience import TERMINAL
from partita.commands.results import ExportResult
from partita.commands.terminal import Bars, fold, note, print_record, size, write_stdout
from partita.errors import UsageError
from partita.export.companions import Reader
from partita.export.pipeline import ExportOptions, Summary, check_options, export
from partita.export.progress import stage
from partita.export.running import BY_REPLAY
from partita.export.target import Target
from partita.library.audience import QUIET, Audience
from partita.library.target import find_target
from partita.package import Manifest, SmokeRecord, TokenizerKind, Verification

LABEL = 14
"""Columns before what a line of the summary says."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which provider the package is for."""

    name: str | None = None
    """None: the best usable one, which is asked only when the lowering is to be found."""
    options: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    """Plugin libraries, NAME=PATH."""
    default_allowed: bool = False


def run(options: ExportOptions, wanted: TargetOptions, bars: Bars, *, as_json: bool) -> None:
    """Export and say what was written. `bars` show how far it is."""
    check_options(options)
    with bars:
        with stage(bars, "find target", {}):
            target = choose_target(options, wanted, TERMINAL)
        summary = export(options, replay=replay, smoke=smoke, reader=reader(), target=target, progress=bars)
    for line in summary.notes:
        note(f"note: {line}")
    if as_json:
        print_record(as_record(summary))
    else:
        write_stdout("\n".join(fold(line, sys.stdout, LABEL) for line in describe(summary)) + "\n")


def choose_target(options: ExportOptions, wanted: TargetOptions, audience: Audience = QUIET) -> Target | None:
    """The target; None when the user named a lowering and no target, so that there is nothing to ask.

    Raises UsageError, and ProviderError when the target cannot be asked.
    """
    if wanted.name is None and options.attention != "auto":
        if wanted.options or wanted.default_allowed or wanted.libraries:
            raise UsageError(
                "--provider-option, --provider-library and --target-default are about the provider that --target "
                "names; add it"
            )
        return None
    if wanted.name is None and wanted.libraries:
        raise UsageError("--provider-library brings a provider that --target names; add it")
    return find_target(
        wanted.name,
        wanted.options,
        default_allowed=wanted.default_allowed,
        libraries=wanted.libraries,
        audience=audience,
    )


def replay(folder: Path, manifest: Manifest) -> Verification:
    """Replay the known answer on the CPU provider."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.verify import replay as replay_on

    return replay_on(folder, parse_chain("cpu"), manifest=manifest)


def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
    """Open the package on the CPU provider and run a chunk and a token."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.smoke import smoke as smoke_on

    return smoke_on(folder, parse_chain("cpu"), manifest=manifest)


def reader() -> Reader:
    """How generate reads the files of a package."""
    from partita.runtime.text import load_text, stop_token_ids

    def chat(folder: Path, kind: TokenizerKind) -> bool:
        try:
            load_text(folder, kind).encode_chat("Hello")
        except UsageError:  # there is no template
            return False
        return True

    return Reader(stop_token_ids, chat)


def cache_bytes_per_token(manifest: Manifest) -> int:
    """What one token of one row takes in the keys and values of all layers."""
    graph = manifest.graph
    return (graph.cache_bytes - fixed_state_bytes(manifest)) // (graph.batch_size * graph.max_length)


def fixed_state_bytes(manifest: Manifest) -> int:
    """Convolution and recurrent states, whose size does not depend on how many tokens there are."""
    states = [state for state in manifest.graph.states if state.kind not in ("key", "value")]
    return sum(math.prod(state.shape) * (4 if state.dtype == "float32" else 2) for state in states)


def _cache(manifest: Manifest) -> str:
    """How large the cache is, and what of it grows with the tokens."""
    graph, fixed = manifest.graph, fixed_state_bytes(manifest)
    windows = sorted({state.window for state in graph.states if state.window is not None})
    parts = [f"{cache_bytes_per_token(manifest):,} bytes per token"] if graph.cache_bytes > fixed else []
    parts += [f"{size(fixed)} of convolution and recurrent states"] if fixed else []
    parts += [f"batch {graph.batch_size}", f"{graph.max_length:,} tokens"]
    parts += [f"window {', '.join(map(str, windows))}"] if windows else []
    return f"{size(graph.cache_bytes)}: {', '.join(parts)}"


def as_record(summary: Summary) -> ExportResult:
    """The summary for `--json`."""
    return ExportResult(
        package=str(summary.out),
        manifest=summary.manifest,
        attention_reason=summary.attention_reason,
        passes=summary.passes,
        cache_bytes_per_token=cache_bytes_per_token(summary.manifest),
        fixed_state_bytes=fixed_state_bytes(summary.manifest),
        peak_rss_bytes=summary.peak_rss_bytes,
        seconds={name: round(value, 3) for name, value in summary.seconds.items()},
        notes=tuple(summary.notes),
    )


def describe(summary: Summary) -> list[str]:
    """The summary for people."""
    manifest, graph = summary.manifest, summary.manifest.graph
    source = manifest.source
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph.opsets.items())
    return [
        f"{summary.out}: {source.architecture} exported, {manifest.verification.status}{_by_twin(manifest)}",
        f"  model       {source.model_type}, {source.parameters:,} parameters, {source.dtype} -> {graph.precision}",
        *(f"  graph       {file.file}: {file.nodes:,} nodes" for file in graph.files),
        f"  attention   {graph.attention} ({summary.attention_reason}); opset {opsets}",
        f"  weights     {size(graph.weight_bytes)}",
        f"  cache       {_cache(manifest)}",
        f"  verified    {_verification(manifest.verification)}",
        *_smoke(manifest),
        *_target(manifest),
        f"  peak RSS    {size(summary.peak_rss_bytes)}",
        "  seconds     " + ", ".join(f"{name} {value:.1f}" for name, value in summary.seconds.items()),
    ]


def _smoke(manifest: Manifest) -> list[str]:
    """Where it was run; a line only where that says more than the verification does."""
    told = [
        f"{entry.chain}: {entry.status.replace('_', ' ')}, {entry.detail}"
        for entry in manifest.smoke
        if entry.detail != BY_REPLAY
    ]
    return [f"  smoke run   {line}" for line in told]


def _target(manifest: Manifest) -> list[str]:
    """The line on the target; none when nobody was asked."""
    target = manifest.target
    if target is None:
        return []
    told = {"verified": "verified on it", "unverified": "NOT verified on it", "not_run": "not run on it"}
    return [f"  target      {target.provider} ({target.source}), asked {target.how}; {told[target.verification]}"]


def _by_twin(manifest: Manifest) -> str:
    """What was verified in place of the package itself."""
    return " through a float32 twin" if manifest.verification.twin is not None else ""


def _verification(result: Verification) -> str:
    if result.status != "verified":
        return f"no: {result.detail}"
    return f"yes: {result.detail}"
