"""Terminal, Markdown and HTML views of comparison, check and explanation records; hostile names are escaped."""

from __future__ import annotations

from importlib import import_module

import pytest

from partita.check.gate import check
from partita.compare.reports import compare
from partita.explain.node_explanation import find
from partita.observations.records import Record
from partita.options.reports import CheckOptions
from partita.partition_reports.render.show import REPORT_VIEWS, load_view, view_names
from partita.partition_reports.sections.model import Document, shown_blocks
from tests.partition_reports.html_tree import read, words
from tests.partition_reports.report_changes import HARMFUL, HOSTILE, mixed, moved, renamed
from tests.partition_reports.reports import recorded
from tests.partition_reports.test_narrow_terminals import made_bench, made_machine
from tests.support.tables import answer, table

QUERY = "model.layers.0.self_attn.q_proj/MatMul"

RECORDS: dict[str, Record] = {
    REPORT_VIEWS: mixed(),
    "partita.compare.document": compare(mixed(), moved(QUERY)),
    "partita.explain.document": find(recorded("webgpu"), "model.layers.0.self_attn/Attention"),
    "partita.check.gate": check(mixed(), CheckOptions(max_cpu_nodes=0, max_copies=9), "run.json"),
    "partita.bench.sections": made_bench(),
    "partita.machine.document": made_machine(),
    "partita.support.sections": table(answer("Cast", "supported", "T=tensor(float)")),
}
"""Module of a document -> a record that it shows."""


def document_of(where: str) -> Document:
    """The document of the record of a module."""
    document = import_module(where).VIEWS.document
    assert document is not None
    found: Document = document(RECORDS[where])
    return found


ALL = [(where, view) for where in RECORDS for view in view_names(where)]


@pytest.mark.parametrize(("where", "name"), ALL)
def test_every_view_has_name_suffix_and_trailing_newline(where: str, name: str) -> None:
    view = load_view(name, where)
    text = view.to_text(RECORDS[where])
    assert view.name == name and view.suffix.startswith(".")
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("where", RECORDS)
def test_markdown_and_html_have_headline_first_and_every_section(where: str) -> None:
    record = RECORDS[where]
    document = document_of(where)
    first, *_ = document.headline
    markdown = load_view("markdown", where).to_text(record)
    assert markdown.startswith(f"### {document.sign} {first[:8]}".replace("  ", " "))
    page = read(load_view("html", where).to_text(record))
    titles = [words(element) for element in page.all("h2")]
    for section in document.sections:
        assert section.title in titles
        assert section.title in markdown or not shown_blocks(section.blocks)


def test_markdown_comparison_folds_environment_and_request() -> None:
    text = load_view("markdown", "partita.compare.document").to_text(RECORDS["partita.compare.document"])
    assert text.splitlines()[0] == f"### {document_of('partita.compare.document').headline[0].replace('>', '&#62;')}"
    assert "#### Moved: 1 node" in text and f"**nodes**: {QUERY}" in text
    assert "<details><summary>Environment and request</summary>" in text


def test_markdown_check_lists_failed_limits_first() -> None:
    text = load_view("markdown", "partita.check.gate").to_text(RECORDS["partita.check.gate"])
    rows = [line for line in text.splitlines() if line.startswith("| --max")]
    assert [row.split(" | ")[1] for row in rows] == ["NO", "yes"]
    assert text.startswith("### run.json: 1 of 2 checks failed: --max-cpu-nodes 0")


def test_html_links_point_to_existing_sections() -> None:
    page = read(load_view("html", "partita.compare.document").to_text(RECORDS["partita.compare.document"]))
    targets = {element["href"].removeprefix("#") for element in page.all("a") if element["href"].startswith("#")}
    ids = {element["id"] for element in page.all("section", "main")}
    assert targets <= ids and {"moved", "cost"} <= targets


@pytest.mark.parametrize("name", [HOSTILE, "<img src=x>|`@all`/Mul"])
def test_hostile_names_are_escaped_in_every_view(name: str) -> None:
    names = {QUERY: name, "Memcpy": name + "2"}
    found = compare(renamed(mixed(), names), renamed(moved(QUERY), names), names=(name, "b"))
    explained = find(renamed(moved(QUERY), names), name)
    for where, record in {"partita.compare.document": found, "partita.explain.document": explained}.items():
        for view in view_names(where):
            text = load_view(view, where).to_text(record)
            assert not HARMFUL & set(text), (where, view)
            assert view not in ("markdown", "html") or "<img" not in text, (where, view)
            assert view != "markdown" or "@all" not in text, (where, view)
