"""`partita report`: its verbs, their arguments and options.

`--view NAME` reaches every view of what a verb shows; `--json`, `show --brief`, `html`, `markdown` and `trace` are
short forms of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import JsonOption, OutOption, help_alone, read_path, view_option
from partita.partition_reports.render.view import REPORT_VIEWS

app = typer.Typer(
    name="report",
    help="Inspect, compare and check partition reports.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def common_report(context: typer.Context) -> None:
    """Inspect, compare and check partition reports."""
    help_alone(context)


ReportArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Report written by `--report FILE`.", show_default=False, parser=read_path),
]


@app.command(epilog="Example: partita report show run.json")
def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Report written by `generate --report`.", show_default=False, parser=read_path
        ),
    ],
    view: Annotated[str | None, view_option(REPORT_VIEWS)] = None,
    out: OutOption = None,
    brief: Annotated[bool, typer.Option("--brief", help="At most ten lines; short for --view brief.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a report: what happened and what to do about it, then the tables behind it."""
    from partita.commands import report as verb
    from partita.commands.showing import asked

    verb.show(file, asked(view, out, as_json=as_json, brief=brief))


@app.command("html", epilog="Example: partita report html run.json --out run.html")
def report_html(
    file: ReportArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PAGE",
            parser=read_path,
            help="File for the page; - is stdout. Default: FILE with the suffix .html.",
        ),
    ] = None,
) -> None:
    """Write a report as one HTML page that works offline."""
    from partita.commands import report as verb
    from partita.commands.showing import Asked

    verb.show(file, Asked("html", out), beside=True)


@app.command("markdown", epilog="Example: partita report markdown run.json >> $GITHUB_STEP_SUMMARY")
def report_markdown(
    file: ReportArgument,
    out: OutOption = None,
) -> None:
    """Write a report as Markdown, for CI job summaries and pull request comments: the answer first, the rest folded."""
    from partita.commands import report as verb
    from partita.commands.showing import Asked

    verb.show(file, Asked("markdown", out))


@app.command(epilog="Example: partita report explain run.json layers.0.mlp.up_proj/MatMul")
def explain(
    file: ReportArgument,
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Node name, or any unique part of it.", show_default=False)
    ],
    view: Annotated[str | None, view_option("partita.explain.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything known about one node: where it ran, why, every experiment, what it costs. A node that was
    removed by fusion is explained through the one that replaced it. An ambiguous part lists the matches; exit code 2.
    """
    from partita.commands import report as verb
    from partita.commands.showing import asked

    verb.explain(file, node, asked(view, out, as_json=as_json))


@app.command(epilog="Example: partita report diff last-week.json today.json")
def diff(
    before: Annotated[
        Path, typer.Argument(metavar="A", help="The earlier report.", show_default=False, parser=read_path)
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="The later report.", show_default=False, parser=read_path)],
    force: Annotated[
        bool, typer.Option("--force", help="Compare reports of different models (otherwise an error, exit code 1).")
    ] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit code 1 if nodes, reasons or copies differ, like git diff --exit-code; versions and times are "
            "ignored.",
        ),
    ] = False,
    view: Annotated[str | None, view_option("partita.diff.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed in B: nodes moved, added or removed, reasons, copies, versions, and the cost."""
    from partita.commands import report as verb
    from partita.commands.showing import asked

    raise Exit(verb.diff(before, after, asked(view, out, as_json=as_json), force=force, exit_code=exit_code))


@app.command(epilog="Example: partita report check run.json --require 'provider=webgpu,share>=0.95' --max-copies 2")
def check(
    file: ReportArgument,
    max_cpu_nodes: Annotated[
        int | None, typer.Option(help="Maximum number of nodes on the CPU provider, in any phase.")
    ] = None,
    max_copies: Annotated[
        int | None, typer.Option(help="Maximum number of Memcpy nodes in a decode step or run.")
    ] = None,
    max_copy_bytes_per_token: Annotated[
        int | None, typer.Option(help="Maximum bytes copied between devices in a decode step or run.")
    ] = None,
    max_unexplained: Annotated[
        int | None, typer.Option(help="Maximum number of fallbacks without a reason, in any phase.")
    ] = None,
    require_cache_in_place: Annotated[
        bool, typer.Option("--require-cache-in-place", help="Require every cache state to stay in one buffer.")
    ] = False,
    min_tokens_per_second: Annotated[float | None, typer.Option(help="Minimum decode speed.")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITIONS",
            help="FIELD OP VALUE, comma-separated; all have to hold in every phase; can be "
            "repeated. Nodes: phase, op, module, provider, reason (= or !=). Numbers: nodes, share, time_share "
            "of those nodes; partitions, copies, copy_bytes_per_token, tokens_per_second, p50_ms of a phase; "
            "cpu_nodes, memcpy_nodes, copy_bytes, unavailable, unexplained, cache_in_place, decode_tokens_per_second "
            "of the report; with --baseline nodes_left, new_reasons, more_copies, more_copy_bytes, lost_phases, "
            "lost_cache, wanted_other, slowdown (= != < <= > >=).",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="A",
            parser=read_path,
            help="Baseline report: fail on nodes moved off their provider, new reasons, copies or copied bytes.",
        ),
    ] = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(help="With --baseline: 0.1 allows 10 % more time per token. Default: no limit."),
    ] = None,
    view: Annotated[str | None, view_option("partita.check.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a report against limits, for CI. Exit code 5 with one line per failed requirement."""
    from partita.commands import report as verb
    from partita.commands.showing import asked
    from partita.library.checking import Wanted

    verb.check(
        file,
        Wanted(
            max_cpu_nodes=max_cpu_nodes,
            max_copies=max_copies,
            max_copy_bytes_per_token=max_copy_bytes_per_token,
            max_unexplained=max_unexplained,
            cache_in_place=require_cache_in_place,
            min_tokens_per_second=min_tokens_per_second,
            require=tuple(require or ()),
            max_slowdown=max_slowdown,
        ),
        baseline,
        asked(view, out, as_json=as_json),
    )


@app.command(epilog="Example: partita report trace run.json --out trace.json")
def trace(
    file: ReportArgument,
    out: OutOption = None,
) -> None:
    """Write the observed runs as a trace for Perfetto or chrome://tracing: every node, on its provider's track."""
    from partita.commands import report as verb
    from partita.commands.showing import Asked

    verb.show(file, Asked("trace", out))
