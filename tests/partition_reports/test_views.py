"""Every view shows the whole document of every kind of record; names are escaped; options that select a view."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import unescape

import pytest
from rich.console import Console

from partita import cli
from partita.compare.reports import compare
from partita.errors import UsageError
from partita.explain import find
from partita.observations.text_format import clean
from partita.partition_reports import storage
from partita.partition_reports.render.show import GENERAL, REPORT_VIEWS, load_view, view_names
from partita.partition_reports.sections.model import (
    Block,
    Command,
    Document,
    Group,
    LayerMap,
    Line,
    Section,
    Table,
    shown_blocks,
    shown_rows,
)
from tests.partition_reports.documents import MATMUL, document_of, records
from tests.partition_reports.html_tree import Element, read, section, words
from tests.partition_reports.report_changes import HARMFUL, HOSTILE, mixed, moved, renamed
from tests.partition_reports.reports import REPORTS
from tests.views import print_text

CASES = {**records(), **{f"report: {name}": (REPORT_VIEWS, None) for name in REPORTS}}


@dataclass(frozen=True)
class Shown:
    """One document in every form."""

    document: Document
    page: Element
    terminal: str
    markdown: str


def squeezed(shown: str) -> str:
    return clean(" ".join(shown.split()))


@pytest.fixture(scope="module", params=CASES)
def shown(request: pytest.FixtureRequest) -> Shown:
    where, record = CASES[request.param]
    record = record or REPORTS[request.param.removeprefix("report: ")]()
    texts = {name: load_view(name, where).to_text(record) for name in GENERAL}
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in texts.values())
    stream = io.StringIO()
    print_text(record, where, Console(file=stream, width=1000, color_system=None))
    markdown = unescape(re.sub(r"<[^>]*>|&#8203;", "", texts["markdown"])).replace("|", " ")
    terminal = "" if where == "partita.check.gate" else squeezed(stream.getvalue())
    return Shown(document_of(where, record), read(texts["html"]), terminal, squeezed(markdown))


def own_texts(block: Block) -> Iterator[str]:
    """Texts of a block itself, without those of the blocks in it; a row of a table is one text."""
    if isinstance(block, Line):
        yield from (block.text, block.label)
    elif isinstance(block, Command):
        yield from block.text.split()  # a terminal breaks it after every option
    elif isinstance(block, Table):
        yield from (" ".join(filter(None, row)) for row in block.rows)
    elif isinstance(block, Group):
        yield block.title


def every_block(blocks: Iterable[Block]) -> Iterator[Block]:
    """Blocks and those within them."""
    for block in blocks:
        yield block
        if isinstance(block, Group):
            yield from every_block(block.blocks)


def short_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """The same of views that shorten: without folds, and with the first rows of long tables."""
    for block in shown_blocks(tuple(blocks)):
        if isinstance(block, Table):
            yield Table(block.caption, block.columns, shown_rows(block)[0])
        elif isinstance(block, Group):
            yield Group(block.title, ())
            yield from short_blocks(block.blocks)
        elif not (isinstance(block, Line) and "more group" in block.text):
            yield block


def test_html_shows_every_text_of_every_section(shown: Shown) -> None:
    assert [words(link) for link in shown.page.one("nav").all("a")] == [
        squeezed(part.title) for part in shown.document.sections
    ]
    for part in shown.document.sections:
        found = section(shown.page, part.key)
        within, rows = words(found), [words(row) for row in found.all("tr")]
        for block in every_block(part.blocks):
            for each in map(squeezed, own_texts(block)):
                assert each in (rows if isinstance(block, Table) else within), (part.key, each)


@pytest.mark.parametrize("view", ["terminal", "markdown"])
def test_terminal_and_markdown_show_all_untruncated_text(shown: Shown, view: str) -> None:
    printed: str = getattr(shown, view)
    for part in shown.document.sections if printed else ():
        for block in short_blocks(part.blocks):
            for each in own_texts(block):
                assert squeezed(each) in printed, (part.key, each)


def test_headline_and_opening_are_the_same_in_every_view(shown: Shown) -> None:
    for printed in filter(None, (words(shown.page.one("body")), shown.terminal, shown.markdown)):
        for block in short_blocks(shown.document.opening):
            assert all(squeezed(each) in printed for each in own_texts(block)), block
        for sentence in shown.document.headline:  # the page has the name as its title
            assert squeezed(sentence.removeprefix(f"{shown.document.name}: ")) in printed


def test_blocks_without_content_are_omitted() -> None:
    part = Section("", "", (Table("", (), ()), Line(""), Group("", ()), Group("", (Line("b"),), "", True), Line("a")))
    assert len(part.blocks) == 2 and shown_blocks([*part.blocks, LayerMap("", "", (), (), ())]) == [Line("a")]


@pytest.mark.parametrize("name", [HOSTILE, "<img src=x>|`@all`/Mul"])
def test_hostile_names_are_escaped_in_every_view(name: str) -> None:
    names = {MATMUL: name, "Memcpy": name + "2"}
    found = compare(renamed(mixed(), names), renamed(moved(MATMUL), names), names=(name, "b"))
    explained = find(renamed(moved(MATMUL), names), name)
    for where, record in {"partita.compare.document": found, "partita.explain": explained}.items():
        for view in view_names(where):
            text = load_view(view, where).to_text(record)
            assert not HARMFUL & set(text), (where, view)
            assert view not in ("markdown", "html") or "<img" not in text, (where, view)
            assert view != "markdown" or "@all" not in text, (where, view)


# Options that select a view


@pytest.fixture
def stored(tmp_path):
    storage.write(mixed(), tmp_path / "run.json")
    return tmp_path / "run.json"


def test_unknown_and_conflicting_views_are_usage_errors(stored, capsys):
    with pytest.raises(UsageError, match=r"unknown view 'pie'; choose from: .*json"):
        load_view("pie")
    assert cli.run(["report", "show", str(stored), "--view", "pie"]) == 2
    assert cli.run(["report", "show", str(stored), "--view", "html", "--full"]) == 2
    assert "--view and --full select different views" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("short", "view"),
    [
        (["show", "--json"], "json"),
        (["show", "--full"], "text"),
        (["markdown"], "markdown"),
        (["html", "--out", "-"], "html"),
        (["show"], "brief"),
    ],
)
def test_report_verbs_match_their_view(stored, capsys, short, view):
    verb, *options = short
    assert cli.run(["report", verb, str(stored), *options]) == 0
    printed = capsys.readouterr().out
    assert cli.run(["report", "show", str(stored), "--view", view]) == 0
    assert capsys.readouterr().out == printed
