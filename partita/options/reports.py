"""Options of `report` and its verbs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from partita.options.fields import COUNT, NUMBER, Option, PathText, option
from partita.options.groups import Out, PlacementLimits, ReportArgument, ViewOptions

REPORT_VIEWS = "partita.partition_reports.sections.report"


@dataclass(frozen=True, kw_only=True)
class ShowCommand(ViewOptions):
    """Summarise a report in at most ten lines: what happened, why, and what to do about it."""

    VIEWS = REPORT_VIEWS
    file: Annotated[
        PathText,
        Option("Report written by `--report FILE`, or a result of `bench --out` or `support --out`.", positional=True),
    ]
    view: str | None = option("View. Default: by the suffix of --out, else brief.", complete="views", group="Output")
    full: bool = option("All tables; short for --view text.", default=False, group="Output")


@dataclass(frozen=True, kw_only=True)
class HtmlCommand:
    """Write a report as one HTML page that works offline."""

    file: ReportArgument
    out: PathText | None = option(
        "File for the page; - is stdout. Default: FILE with the suffix .html.",
        short="-o",
        metavar="PAGE",
        group="Output",
    )


@dataclass(frozen=True, kw_only=True)
class MarkdownCommand:
    """Write a report as Markdown, for CI job summaries and pull request comments: the answer first, the rest folded."""

    file: ReportArgument
    out: Out = None


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(ViewOptions):
    """Show everything known about one node: where it ran, why, every experiment, what it costs. A node that was
    removed by fusion is explained through the node that replaced it. An ambiguous part lists the matches; exit code 2.
    """

    VIEWS = "partita.explain"
    file: ReportArgument
    node: Annotated[str, Option("Node name, or any unique part of it.", metavar="NODE", positional=True)]
    all: bool = option("Also the reasons that lost by precedence, with their evidence.", default=False)


@dataclass(frozen=True, kw_only=True)
class DiffCommand(ViewOptions):
    """Show what changed in B: nodes moved, added or removed, reasons, copies, versions, and the cost."""

    HELP_GROUP = "Comparison"
    VIEWS = "partita.compare.document"
    before: Annotated[PathText, Option("The earlier report or support table.", metavar="A", positional=True)]
    after: Annotated[PathText, Option("The later one.", metavar="B", positional=True)]
    force: bool = option("Compare reports of different models (otherwise an error, exit code 1).", default=False)
    exit_code: bool = option(
        "Exit code 1 if nodes, reasons or copies differ, like git diff --exit-code; versions and times are ignored.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PlacementLimits):
    """Requirements for a report."""

    HELP_GROUP = "Limits"
    max_unexplained: int | None = option("Maximum number of fallbacks without a reason, in any phase.", range=COUNT)
    cache_in_place: bool = option(
        "Require every cache state to stay in the same buffer.", default=False, flags=("--require-cache-in-place",)
    )
    min_tokens_per_second: float | None = option("Minimum decode speed.", range=NUMBER)
    require: Sequence[str] = option(
        "FIELD OP VALUE, comma-separated; all must hold in every phase; can be repeated. Selection: phase, "
        "op, module, provider, reason (= or !=). Numbers (= != < <= > >=): nodes, share of the selected nodes; "
        "copies, tokens_per_second of a phase; unavailable of the report.",
        default=(),
        metavar="CONDITIONS",
    )
    max_slowdown: float | None = option(
        "With --baseline: 0.1 allows 10 % more time per token. Default: no limit.", range=NUMBER
    )


@dataclass(frozen=True, kw_only=True)
class CheckCommand(ViewOptions, CheckOptions):
    """Check a report against limits, for CI. Exit code 5 with one line per failed requirement."""

    VIEWS = "partita.check.gate"
    file: ReportArgument
    other_reports: Sequence[str] = option("Further reports to check.", default=(), metavar="MORE", positional=True)
    max_drift: float | None = option(
        "Maximum relative error of a layer or output; for results of `drift --json`.", range=NUMBER, group="Limits"
    )
    baseline: PathText | None = option(
        "Baseline report: fail on nodes moved off their provider, new reasons, copies or copied bytes.",
        metavar="A",
        group="Limits",
    )
