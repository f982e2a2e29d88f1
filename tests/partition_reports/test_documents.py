"""What is said of a record once is in every view of it: terminal, Markdown, page; and names do no harm in any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from partita.bench.sections import document as bench_document
from partita.check.document import document as check_document
from partita.check.gate import Gate, check
from partita.check.limits import Limits
from partita.diff.compare import compare
from partita.diff.document import document as diff_document
from partita.explain.document import document as explain_document
from partita.explain.node_explanation import find
from partita.machine.document import document as machine_document
from partita.observations.records import Record
from partita.partition_reports.render.view import load_view, view_names
from partita.partition_reports.sections.model import Document
from partita.support.diff.compare import compare as compare_tables
from partita.support.diff.document import document as support_diff_document
from partita.support.sections import document as support_document
from tests.partition_reports.changed import HARMFUL, HOSTILE, mixed, moved, renamed
from tests.partition_reports.html_tree import read, words
from tests.partition_reports.reports import recorded
from tests.partition_reports.test_narrow_terminals import made_bench, made_machine
from tests.support.tables import answer, table

QUERY = "model.layers.0.self_attn.q_proj/MatMul"
BEFORE, AFTER = (table(answer("Cast", outcome, "T=tensor(float)")) for outcome in ("taken", "left"))


@dataclass(frozen=True)
class Product:
    """A record of a folder of views, and what makes its document."""

    document_of: Callable[[Any], Document]
    record: Record

    @property
    def document(self) -> Document:
        return self.document_of(self.record)


PRODUCTS = {
    "diff": Product(diff_document, compare(mixed(), moved(QUERY))),
    "explain": Product(explain_document, find(recorded("webgpu"), "model.layers.0.self_attn/Attention")),
    "check": Product(check_document, check(mixed(), Gate(limits=Limits(0, 9)), "run.json")),
    "bench": Product(bench_document, made_bench()),
    "machine": Product(machine_document, made_machine()),
    "support": Product(support_document, BEFORE),
    "support.diff": Product(support_diff_document, compare_tables(BEFORE, AFTER, names=("a", "b"))),
}
ALL = [(room, view) for room in PRODUCTS for view in view_names(f"partita.{room}.views")]


@pytest.mark.parametrize("room", PRODUCTS)
def test_every_product_has_text_markdown_page_and_json(room: str) -> None:
    assert {"text", "markdown", "html", "json"} <= set(view_names(f"partita.{room}.views"))


@pytest.mark.parametrize(("room", "name"), ALL)
def test_every_view_keeps_the_contract(room: str, name: str) -> None:
    view = load_view(name, f"partita.{room}.views")
    text = view.to_text(PRODUCTS[room].record)
    assert view.name == name and view.suffix.startswith(".") and view.summary
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("room", PRODUCTS)
def test_markdown_and_page_have_every_section_and_the_answer_first(room: str) -> None:
    product = PRODUCTS[room]
    first, *_ = product.document.headline
    markdown = load_view("markdown", f"partita.{room}.views").to_text(product.record)
    assert markdown.startswith(f"### {first[:8]}")
    page = read(load_view("html", f"partita.{room}.views").to_text(product.record))
    titles = [words(element) for element in page.all("h2")]
    for section in product.document.sections:
        assert section.title in titles
        assert section.title in markdown


def test_a_difference_for_a_pull_request_folds_what_surrounds_it() -> None:
    text = load_view("markdown", "partita.diff.views").to_text(PRODUCTS["diff"].record)
    assert text.splitlines()[0] == f"### {PRODUCTS['diff'].document.headline[0].replace('>', '&#62;')}"
    assert "#### Moved: 1 node" in text and f"**nodes**: {QUERY}" in text
    assert "<details><summary>Environment and request</summary>" in text


def test_a_check_shows_what_does_not_hold_first() -> None:
    text = load_view("markdown", "partita.check.views").to_text(PRODUCTS["check"].record)
    rows = [line for line in text.splitlines() if line.startswith("| --max")]
    assert [row.split(" | ")[1] for row in rows] == ["NO", "yes"]
    assert text.startswith("### run.json: 1 of 2 checks failed: --max-cpu-nodes 0")


def test_a_page_leads_to_its_sections() -> None:
    page = read(load_view("html", "partita.diff.views").to_text(PRODUCTS["diff"].record))
    targets = {element["href"].removeprefix("#") for element in page.all("a") if element["href"].startswith("#")}
    ids = {element["id"] for element in page.all("section", "main")}
    assert targets <= ids and {"moved", "cost"} <= targets


@pytest.mark.parametrize("name", [HOSTILE, "<img src=x>|`@all`/Mul"])
def test_hostile_names_do_no_harm_in_any_view(name: str) -> None:
    names = {QUERY: name, "Memcpy": name + "2"}
    found = compare(renamed(mixed(), names), renamed(moved(QUERY), names), names=(name, "b"))
    records = {"diff": found, "explain": find(renamed(moved(QUERY), names), name)}
    for room, record in records.items():
        for view in view_names(f"partita.{room}.views"):
            text = load_view(view, f"partita.{room}.views").to_text(record)
            assert not HARMFUL & set(text), (room, view)
            assert view not in ("markdown", "html") or "<img" not in text, (room, view)
            assert view != "markdown" or "@all" not in text, (room, view)
