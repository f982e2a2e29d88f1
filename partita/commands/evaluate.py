"""`partita evaluate`: the perplexity of a package on a provider, next to the source model's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from partita.commands.audience import TERMINAL, print_chain_notes
from partita.commands.results import EvaluateResult
from partita.commands.terminal import Bars, finite, print_record, stdout_console
from partita.export.progress import stage
from partita.foreign.folder import open_folder
from partita.library.chain import read_chain
from partita.library.engine.jobs import run_job
from partita.library.loading import in_child
from partita.observations.text_format import nats, plural
from partita.options.inspection import EvaluateCommand
from partita.package.folder import Manifest, check_files
from partita.package.records import Evaluation, Quality
from partita.partition_reports.render.terminal import Page
from partita.partition_reports.sections.model import Column


def run(options: EvaluateCommand) -> int:
    """Check the package's hashes, read its text, print the result."""
    package, target = Path(options.package), read_chain(options)
    manifest = open_folder(package)
    check_files(package, manifest, hashes=True)
    with Bars() as bars, stage(bars, "evaluate", {}):
        result = run_job(
            "partita.library.verifying:evaluate",
            *(package, manifest, target),
            chain=target.chain,
            in_worker=in_child(target, "auto"),
            on_chain=partial(print_chain_notes, target),
            audience=TERMINAL,
        )
    if options.as_json:
        print_record(_as_record(package, manifest, result))
    else:
        show(package, manifest, result, stdout_console())
    return 0


def _as_record(package: Path, manifest: Manifest, result: Evaluation) -> EvaluateResult:
    """The result for `--json`."""
    return EvaluateResult(
        package=str(package),
        precision=manifest.graph.precision,
        at_export=manifest.quality,
        **finite(result.model_dump()),
    )


def show(package: Path, manifest: Manifest, result: Evaluation, console: Console) -> None:
    """The result as text: figures measured now, next to those of the export."""
    page = Page(console)
    page.put(f"{package}: {manifest.graph.precision} on {result.provider}")
    stored = manifest.quality
    if stored is not None:
        page.pairs(
            [("text", f"{stored.text}, {result.tokens:,} predicted tokens, windows of {stored.window_tokens} tokens")]
        )
    columns = (Column("figure", number=False), Column("here"), Column("at export"))
    page.table(columns, list(_rows(result, stored)))
    page.pairs([("divergence", _bound(result, stored))])


def _bound(now: Evaluation, stored: Quality | None) -> str:
    """Description of the measured divergence."""
    if now.kl_tokens is None or now.kl_share is None:
        return "not measured: the package lacks the source model's probabilities; export it again"
    told = (
        f"here: lower bound from the {plural(now.kl_tokens, 'likeliest token')} of the source model "
        f"({now.kl_share:.1%} of its probability; all other tokens counted as one)"
    )
    kept = None if stored is None else stored.likely
    if kept is None:
        return told
    return f"{told}; at export: {nats(kept.kl_mean)}, 99th percentile {nats(kept.kl_p99, 3)}"


def _rows(now: Evaluation, stored: Quality | None) -> list[tuple[str, ...]]:
    """Figures measured now and at export."""
    here = (
        ("perplexity", f"{now.perplexity:.3f}"),
        ("perplexity, source model", f"{now.original_perplexity:.3f}"),
        ("ratio", f"{now.perplexity_ratio:.4f}"),
        ("same best token", f"{now.top1_agreement:.1%}"),
        ("KL divergence, mean", _at_least(now.kl_mean_at_least, 4)),
        ("KL divergence, 99th percentile", _at_least(now.kl_p99_at_least, 3)),
    )
    before = [""] * len(here)
    if stored is not None:
        before = [f"{stored.perplexity:.3f}", f"{stored.original_perplexity:.3f}", f"{stored.perplexity_ratio:.4f}"]
        before += [f"{stored.top1_agreement:.1%}", nats(stored.kl_mean), nats(stored.kl_p99, 3)]
    return [(name, figure, old) for (name, figure), old in zip(here, before, strict=True)]


def _at_least(value: float | None, digits: int) -> str:
    """A divergence that is a lower bound; empty for None."""
    return "" if value is None else f">= {nats(value, digits)}"
