"""The partition report as an object: the record that `--report` writes, with methods."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from partita.check import gate
from partita.check.gate import GateResult
from partita.check.requirements import parse_requirement
from partita.compare import reports as comparing
from partita.compare.rows import Comparison
from partita.errors import ReportCheckError, ReportError, UsageError
from partita.explain import Explanation, Matches, find, render_no_single
from partita.files import check_writable, write_text
from partita.library.api import public
from partita.observations.records import Record
from partita.options.fields import check_fields, group
from partita.options.reports import CheckOptions
from partita.partition_reports import records, storage
from partita.partition_reports.outcome import placement_text
from partita.partition_reports.render.show import REPORT_VIEWS, load_view
from partita.providers.resolve import parse_chain

NAMES = 5
"""Maximum number of nodes in an error message."""


class CheckFailedError(ReportCheckError):
    """A report does not meet its requirements. `result` has the outcome of each."""

    def __init__(self, message: str, result: GateResult) -> None:
        super().__init__(message)
        self.result = result


class ViewedRecord(Record):
    """A record with methods that write its views."""

    VIEWS: ClassVar[str]
    """Module with the views."""

    @classmethod
    def of(cls, record: Record) -> Self:
        """The object with the fields of a record."""
        return cls.model_construct(**{name: getattr(record, name) for name in type(record).model_fields})

    @public
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON for `partita report`. Raises ReportError when it cannot be written."""
        self._write("json", path)

    @public
    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A self-contained HTML page; also written to `path` if given."""
        return self._write("html", path)

    @public
    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """GitHub Markdown, e.g. for a CI comment; also written to `path` if given."""
        return self._write("markdown", path)

    @public
    def to_text(self, path: str | os.PathLike[str] | None = None) -> str:
        """Plain-text tables; also written to `path` if given."""
        return self._write("text", path)

    def _write(self, name: str, path: str | os.PathLike[str] | None) -> str:
        """A view, also written to `path` if given. Raises ReportError when it cannot be written."""
        view = load_view(name, self.VIEWS)
        text, kind = view.to_text(self), view.file_kind or f"{name} file"
        if path is not None:
            check_writable(Path(path), kind)
            write_text(text, Path(path), kind)
        return text


class Report(ViewedRecord, records.Report):
    """The partition report of one run: where each node ran, which tensors were copied, and why nodes fell back.

    Its fields are described in docs/report-schema.md. `str` is the report in ten lines; notebooks render a page.
    """

    VIEWS = REPORT_VIEWS

    @classmethod
    @public
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a report written by `save` or `--report`. Raises ReportError for any other file."""
        return cls.of(storage.read(Path(path)))

    def __repr__(self) -> str:
        ran = [placement_text([phase]) for phase in self.phases]
        over = [] if self.totals is None else [f"finish {self.totals.finish_reason}"]
        over += [] if self.failure is None else ["its run failed"]
        checks = [] if all(check.passed for check in self.checks) else ["some of its checks failed"]
        return f"<partita.Report of {self.request.verb} {self.request.path}: {'; '.join([*ran, *over, *checks])}>"

    def __str__(self) -> str:
        """The report in at most ten lines."""
        return load_view("brief").to_text(self).rstrip()

    def _repr_html_(self) -> str:
        """The HTML page in a frame of its own, for a notebook: its styles do not reach the notebook's."""
        return f'<iframe srcdoc="{html.escape(self.to_html())}" width="100%" height="640" frameborder="0"></iframe>'

    @public
    def explain(self, node: str) -> Explanation:
        """Details of one node, by its name or any unique part of it.

        Raises ArgumentError if it matches no node or several.
        """
        found = find(self, node)
        if isinstance(found, Matches):
            listed = ", ".join(found.matches[:NAMES])
            raise UsageError(f"{render_no_single(found)}{f': {listed}' if listed else ''}")
        return found

    @public
    def check(
        self,
        *requirements: str,
        max_cpu_nodes: int | None = None,
        max_copies: int | None = None,
        max_copy_bytes_per_token: int | None = None,
        max_slow_nodes: int | None = None,
        max_unexplained: int | None = None,
        cache_in_place: bool = False,
        min_tokens_per_second: float | None = None,
        baseline: records.Report | None = None,
        max_slowdown: float | None = None,
    ) -> GateResult:
        """Check the report against requirements, limits and a baseline, as `partita report check` does.

        `requirements`: conditions as for `--require`, e.g. "provider=webgpu,share>=0.95". Returns the outcomes when all
        pass. Raises CheckFailedError with the failed checks, and ArgumentError without any requirement.
        """
        options = CheckOptions(
            max_cpu_nodes=max_cpu_nodes,
            max_copies=max_copies,
            max_copy_bytes_per_token=max_copy_bytes_per_token,
            max_slow_nodes=max_slow_nodes,
            max_unexplained=max_unexplained,
            cache_in_place=cache_in_place,
            min_tokens_per_second=min_tokens_per_second,
            require=requirements,
            max_slowdown=max_slowdown,
        )
        compared = None if baseline is None else ("the baseline", baseline)
        result = check_report(self, check_fields(options), "the report", compared)
        if not result.passed:
            wrong = [f"{outcome.check}: {outcome.detail}" for outcome in result.outcomes if not outcome.met]
            raise CheckFailedError("; ".join(wrong), result)
        return result

    @public
    def diff(self, after: records.Report) -> Comparison:
        """The differences to `after`, a later report. Raises ReportError if it is of another model."""
        found = comparing.compare(self, after, names=("before", "after"))
        if found.unrelated_reason:
            raise ReportError(f"the reports cannot be compared: {found.unrelated_reason}")
        return found


def check_report(
    report: records.Report, options: CheckOptions, name: str, baseline: tuple[str, records.Report] | None
) -> GateResult:
    """Check a report, called `name`. `baseline`: a report with its name.

    Raises UsageError for invalid requirements, and without any.
    """
    given = replace(group(options, CheckOptions), require=tuple(options.require))
    if given == CheckOptions() and baseline is None:
        raise UsageError("nothing to check: give a requirement, a limit or `baseline`")
    names = _provider_names(report)
    return gate.check(report, options, name, baseline, [parse_requirement(text, names) for text in options.require])


def _provider_names(report: records.Report) -> Callable[[str], str]:
    """The function that finds a provider in requirements; plugin providers are known only from the report."""
    seen = [entry.provider for entry in report.chain]
    seen += [entry.provider for phase in report.phases for entry in phase.providers]

    def provider(name: str) -> str:
        found = next((entry for entry in seen if name.casefold() == entry.casefold()), None)
        return found or parse_chain(name, argument="require")[0].ort_name

    return provider
