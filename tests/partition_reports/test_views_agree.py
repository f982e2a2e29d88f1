"""HTML, terminal and Markdown show every text of the sections; section counts match the report."""

from __future__ import annotations

import html as markup
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from rich.console import Console

from partita.observations.text_format import clean, decimals
from partita.partition_reports.outcome import counted_rows, fallbacks_of, used_phases
from partita.partition_reports.records import Report
from partita.partition_reports.render.show import REPORT_VIEWS
from partita.partition_reports.sections import copies, fallbacks, phases, placement
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Fold,
    Group,
    Line,
    Pairs,
    Section,
    Table,
    shown_blocks,
    shown_rows,
    text_of,
)
from partita.partition_reports.sections.report import document, sections
from tests.partition_reports.html_tree import Element, read, section, words
from tests.partition_reports.reports import REPORTS
from tests.partition_reports.samples import shown as view_of
from tests.views import print_text


@dataclass(frozen=True)
class Shown:
    """One report in every form."""

    report: Report
    page: Element
    terminal: str
    markdown: str


def squeezed(shown: str) -> str:
    return clean(" ".join(shown.split()))


@pytest.fixture(scope="module", params=REPORTS)
def shown(request: pytest.FixtureRequest) -> Shown:
    report = REPORTS[request.param]()
    stream = io.StringIO()
    print_text(report, REPORT_VIEWS, Console(file=stream, width=1000, color_system=None))
    plain = markup.unescape(re.sub(r"<[^>]*>|&#8203;", "", view_of(report, "markdown")))
    page = read(view_of(report, "html"))
    return Shown(report, page, squeezed(stream.getvalue()), squeezed(plain.replace("|", " ")))


def own_texts(block: Block) -> Iterator[str]:
    """Texts of a block itself, without those of the blocks in it; a row of a table is one text."""
    if isinstance(block, Line):
        yield text_of(block.text)
        yield block.label
    elif isinstance(block, Command):
        yield block.text
        yield block.does
    elif isinstance(block, Pairs):
        yield from (each for name, values in block.rows for each in (name, *values))
    elif isinstance(block, Table):
        yield from (" ".join(filter(None, map(text_of, row.cells))) for row in block.rows)
    elif isinstance(block, (Fold, Group)):
        yield block.title


def every_block(blocks: Iterable[Block]) -> Iterator[Block]:
    """Blocks and those within them."""
    for block in blocks:
        yield block
        if isinstance(block, (Fold, Group)):
            yield from every_block(block.blocks)


def short_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """The same of views that shorten: without folds, and with the first rows of long tables."""
    for block in shown_blocks(tuple(blocks)):
        if isinstance(block, Table):
            yield Table(block.caption, block.columns, shown_rows(block)[0])
        elif isinstance(block, Group):
            yield Group(block.title, ())
            yield from short_blocks(block.blocks)
        elif not (isinstance(block, Line) and "more group" in text_of(block.text)):
            yield block


def test_html_shows_every_text_of_every_section(shown: Shown) -> None:
    listed = [words(link) for link in shown.page.one("nav").all("a")]
    assert listed == [squeezed(part.title) for part in sections(shown.report)]
    for part in sections(shown.report):
        within = words(section(shown.page, part.key))
        rows = [words(row) for row in section(shown.page, part.key).all("tr")]
        for block in every_block(part.blocks):
            for each in own_texts(block):
                wanted = squeezed(each)
                assert wanted in (rows if isinstance(block, Table) else within), (part.key, each)


@pytest.mark.parametrize("view", ["terminal", "markdown"])
def test_terminal_and_markdown_show_all_untruncated_text(shown: Shown, view: str) -> None:
    printed: str = getattr(shown, view)
    for part in sections(shown.report):
        for block in short_blocks(part.blocks):
            for each in own_texts(block):
                if isinstance(block, Command):  # a terminal breaks it after every option
                    assert all(squeezed(word) in printed for word in block.text.split()), each
                else:
                    assert squeezed(each) in printed, (part.key, each)


def test_opening_is_the_same_in_every_view(shown: Shown) -> None:
    found, page = document(shown.report), words(shown.page.one("body"))
    for printed in (page, shown.terminal, shown.markdown):
        for block in found.opening:
            if isinstance(block, Command):  # a terminal breaks it after every option
                assert all(squeezed(word) in printed for word in block.text.split()), block
            else:
                assert all(squeezed(each) in printed for each in own_texts(block)), block
        name, outcome = found.headline[0].split(": ", 1)  # the page has the name as its title
        assert squeezed(outcome) in printed and squeezed(name) in printed


def rows_of(part: Section | None, first_column: str) -> dict[str, tuple[str, ...]]:
    """Rows of the tables whose first column has this title, by their first cell."""
    blocks = every_block(part.blocks) if part is not None else ()
    tables = [block for block in blocks if isinstance(block, Table) and block.columns[0].title == first_column]
    return {text_of(row.cells[0]): tuple(map(text_of, row.cells)) for table in tables for row in table.rows}


def leading(cell: str) -> int:
    """The count that a text begins with."""
    return int(re.findall(r"^[\d,]+", cell)[0].replace(",", ""))


def test_phase_table_matches_the_report(shown: Shown) -> None:
    rows = rows_of(phases.section(shown.report), "figure")
    for at, phase in enumerate(shown.report.phases, start=1):
        assert leading(rows["partitions"][at]) == len(phase.partitions)
        if phase.cost is not None:
            assert leading(rows["copies between devices"][at]) == phase.cost.copies == len(phase.copies)
        for entry in phase.providers:
            short = entry.provider.removesuffix("ExecutionProvider")
            (cells,) = [cells for name, cells in rows.items() if re.match(rf"nodes on {re.escape(short)}\b", name)]
            assert leading(cells[at]) == entry.nodes, "added nodes have a row of their own"
        if shown.report.dry_run is None:
            assert rows["step p50, ms"][at] == decimals(phase.step_p50_ms)
            assert rows["steps"][at] == f"{phase.steps:,}"


def test_placement_tables_have_row_per_layer_operator_and_module(shown: Shown) -> None:
    report, placed = shown.report, placement.section(shown.report)
    for rows, groups in (
        (rows_of(placement.layers_section(report), "layer"), "by_layer"),
        (rows_of(placed, "operator"), "by_op_type"),
        (rows_of(placed, "module"), "by_module"),
    ):
        entries = [entry for phase in used_phases(report) for entry in getattr(phase, groups)]
        assert set(rows) == {entry.name for entry in entries}
        assert all(f"{entry.nodes:,}" in rows[entry.name][1].split(" / ") for entry in entries)


def test_section_counts_match_the_report(shown: Shown) -> None:
    report, used = shown.report, used_phases(shown.report)
    found = copies.section(report)
    tables = [each for each in every_block(found.blocks if found else ()) if isinstance(each, Table)]
    counted = [sum(leading(text_of(row.cells[2])) for row in each.rows) for each in tables]
    assert set(counted) == {len(phase.copies) for phase in used if phase.copies}
    nodes = {entry.node for entry in report.fallbacks}
    if nodes:
        found = fallbacks.section(report)
        assert leading(found.about) == len({name for names in counted_rows(report).values() for name in names})
        groups = [block for block in found.blocks if isinstance(block, Group) and re.fullmatch(r"r\d+", block.anchor)]
        assert len(groups) == len({(entry.reason, entry.provider) for entry in fallbacks_of(report)})
