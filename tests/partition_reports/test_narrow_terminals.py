"""Text views at 60, 80 and 120 columns: nothing is omitted, no line is too wide or ends in spaces."""

from __future__ import annotations

import io
from collections import Counter
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console

from partita.commands.results import render_refusal
from partita.diagnosis.explanation import refused_nodes
from partita.partition_reports.render.show import REPORT_VIEWS
from partita.runtime.chain.advice import rows_of
from tests.diagnosis import test_refusal
from tests.partition_reports.documents import records
from tests.partition_reports.reports import REPORTS
from tests.views import print_text

WIDTHS = (120, 80, 60)
TABLES = ("recorded webgpu", "recorded cuda dry run", "recorded torch export", "many inputs", "unavailable")
"""Reports whose tables differ in kind."""
GOOD = ("recorded cpu", "recorded torch export")
"""Reports without fallbacks."""
OTHERS = [name for name in records() if name != "check"]


@cache
def shown(name: str, width: int, view: str = "text") -> str:
    if name == "refusal":
        return render_refusal(rows_of(refused_nodes(test_refusal.opened(), test_refusal.GPU_ALONE), ()), width)
    where, record = records()[name] if name in records() else (REPORT_VIEWS, REPORTS[name]())
    stream = io.StringIO()
    print_text(record, where, Console(file=stream, width=width, color_system=None), view)
    return stream.getvalue()


def characters(text: str) -> Counter[str]:
    """Counts of letters, digits and signs, without rules of tables and line ends of commands."""
    return Counter(mark for mark in text if mark not in " \n─\\")


def too_wide(line: str, width: int) -> bool:
    """Words of commands are not broken."""
    return cell_len(line) > width and not line.lstrip().startswith(("$ ", "--"))


@pytest.mark.parametrize("name", [*TABLES, *OTHERS, "refusal"])
def test_text_views_fit_every_width_without_omissions(name: str) -> None:
    whole = characters(shown(name, WIDTHS[0]))
    for width in WIDTHS:
        printed = shown(name, width)
        assert not whole - characters(printed), width
        assert [line for line in printed.splitlines() if too_wide(line, width) or line != line.rstrip()] == [], width


def test_terminal_below_60_columns_is_rendered_at_60() -> None:
    assert shown("recorded webgpu", 20) == shown("recorded webgpu", 60)


@pytest.mark.parametrize("name", REPORTS)
def test_brief_view_has_at_most_ten_lines_and_a_remedy(name: str) -> None:
    for width in WIDTHS:
        lines = shown(name, width, "brief").splitlines()
        assert 2 <= len(lines) <= 10
        assert max(map(cell_len, lines)) <= width
        assert name in GOOD or any(line.startswith("remedy:") for line in lines)
