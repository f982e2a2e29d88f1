"""Terminal, page and JSON say the same of every report: each figure is read back from all three."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from partita.observations.text_format import decimals, percent
from partita.partition_reports.outcome import counted_rows, fallbacks_of
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.views import html, text
from tests.partition_reports.html_tree import Element, read, section, words
from tests.partition_reports.reports import REPORTS

LAYER = r"layer \d+|before the layers|between the layers|after the layers|the whole graph|several layers"


@dataclass(frozen=True)
class Shown:
    """One report in every form."""

    report: Report
    text: str
    page: Element

    def timed(self) -> bool:
        return self.report.dry_run is None


@pytest.fixture(scope="module", params=REPORTS)
def shown(request: pytest.FixtureRequest) -> Shown:
    report = REPORTS[request.param]()
    stream = io.StringIO()
    text.render(report, Console(file=stream, width=240, color_system=None))
    return Shown(report, stream.getvalue(), read(html.to_text(report)))


def phases_of(report: Report) -> list[Phase]:
    return [phase for phase in report.phases if phase.nodes]


def text_section(shown: Shown, title: str) -> str:
    """What stands under a heading."""
    found = re.search(rf"^{re.escape(title)}(?::[^\n]*)?\n(.*?)(?=\n\n[^\s]|\Z)", shown.text, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[0]


def text_rows(part: str, names: str) -> dict[str, list[str]]:
    """Rows of a table that begin with one of `names`: what follows, cell by cell; empty cells are left out."""
    rows = re.findall(rf"^  ({names})(?:  +(.*))?$", part, re.MULTILINE)
    return {name: re.split(r"\s{2,}", rest.strip()) for name, rest in rows}


def page_tables(part: Element) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and cells of the tables of a section."""
    return [
        (
            [words(head) for head in table.one("thead").all("th")],
            [[words(cell) for cell in row.children] for row in table.one("tbody").all("tr")],
        )
        for table in part.all("table")
    ]


def page_table(part: Element, first_head: str) -> list[list[str]]:
    return next((rows for heads, rows in page_tables(part) if heads[0] == first_head), [])


def leading(cell: str) -> int:
    """The count that a cell begins with."""
    return int(re.findall(r"^[\d,]+", cell)[0].replace(",", ""))


# per layer


def expected_layers(report: Report) -> dict[str, list[tuple[int, str, str]]]:
    """From the JSON: nodes, milliseconds and share of each layer per phase; what is outside of them in one."""
    raw = report.model_dump(mode="json", by_alias=True)
    found: dict[str, list[tuple[int, str, str]]] = {}
    for phase in (phase for phase in raw["phases"] if phase["nodes"]):
        for group in phase["by_layer"]:
            time, share = group["host_us_per_run"], group["time_share"]
            cell = (group["nodes"], decimals(time, 1e-3), percent(share))
            found.setdefault(group["name"], []).append(cell)
    return found


def test_every_layer_has_the_same_nodes_and_time(shown: Shown) -> None:
    phases = phases_of(shown.report)
    if not phases:
        return
    expected = expected_layers(shown.report)
    layers = {name: cells for name, cells in expected.items() if name.startswith("layer")}
    in_text = text_rows(text_section(shown, "Layers"), LAYER)
    tables = page_tables(section(shown.page, "layers"))
    in_map = {" ".join(re.findall(LAYER, cells[0])[:1]): cells[1:] for cells in tables[0][1]}
    in_page = {cells[0]: cells for cells in tables[1][1]}
    # A terminal shows the first dozen rows.
    assert [name for name in in_page if name.startswith("layer")] == list(layers)
    for name, cells in expected.items():
        counts = " / ".join(dict.fromkeys(f"{nodes:,}" for nodes, _, _ in cells))
        times = [part for _, time, share in cells for part in (time, share)] if shown.timed() else []
        assert in_page[name][1] == counts and in_page[name][len(in_page[name]) - len(times) :] == times, name
        if name in in_text:
            assert in_text[name][0] == counts and in_text[name][len(in_text[name]) - len(times) :] == times, name
        for (nodes, time, _), cell in zip(cells, in_map.get(name, ()), strict=name in in_map):
            assert not nodes or f"{nodes:,} node" in cell, name
            assert (f", {time} ms" in cell) == (time != "-"), (name, cell)
    assert all(name in in_text for name in list(in_page)[:12])
    assert set(in_page) == set(expected)


def test_memcpy_nodes_count_in_one_layer_everywhere(shown: Shown) -> None:
    """What a layer of the map draws is what the table of nodes, and so the JSON, has under this number."""
    phases = phases_of(shown.report)
    if not phases:
        return
    rows = {row["id"]: row for row in section(shown.page, "nodes").all("tr") if row["id"]}
    for map_row in section(shown.page, "layers").all("table")[0].one("tbody").all("tr"):
        number = re.match(r"layer (\d+)", words(map_row.children[0]))
        for cell, phase in zip(map_row.children[1:], phases, strict=True):
            for link in cell.all("a"):
                if (target := rows.get(link["href"][1:])) is None:
                    assert link["href"] == "#layers" and "ambiguous" in {row.state for row in phase.file_nodes}
                    continue
                layer = words(target.children[4])
                node = phase.nodes[int(words(target.children[0]))]
                assert (str(node.layer) if node.layer is not None else "") == layer
                if node.added or node.name == link["title"].partition(" (")[0]:
                    assert layer == (number[1] if number else ""), words(target.children[1])


# counts


def figures_in_text(shown: Shown) -> dict[str, list[str]]:
    return text_rows(text_section(shown, "Phases"), r"\S(?:\S| (?! ))*")


def figures_on_page(shown: Shown) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in page_table(section(shown.page, "phases"), "figure")}


def test_the_figures_of_the_phases_are_the_same_and_those_of_the_report(shown: Shown) -> None:
    report = shown.report
    if not report.phases:
        return
    in_text, on_page = figures_in_text(shown), figures_on_page(shown)
    assert {name: in_text[name] for name in on_page} == on_page
    for at, phase in enumerate(report.phases):
        assert leading(on_page["partitions"][at]) == len(phase.partitions)
        if phase.cost is not None:
            assert leading(on_page["copies between devices"][at]) == phase.cost.copies == len(phase.copies)
            assert leading(on_page["tensors between partitions"][at]) == phase.cost.crossings
        for entry in phase.providers:
            short = entry.provider.removesuffix("ExecutionProvider")
            cells = next(cells for name, cells in on_page.items() if name.startswith(f"nodes on {short}"))
            assert leading(cells[at]) == entry.nodes, "added nodes have a row of their own"
        if shown.timed():
            assert on_page["step p50, ms"][at] == decimals(phase.step_p50_ms)
            assert on_page["steps"][at] == f"{phase.steps:,}"


def test_partitions_and_copies_are_counted_alike(shown: Shown) -> None:
    phases = phases_of(shown.report)
    if not phases:
        return
    tables = page_tables(section(shown.page, "partitions"))
    listed = [rows for heads, rows in tables if heads[0] == "#"]
    seen = re.findall(r"([\d,]+) partitions?(?: in [\w ]+)?, in execution order", text_section(shown, "Partitions"))
    assert [leading(count) for count in seen] == [len(rows) for rows in listed]
    assert {len(rows) for rows in listed} == {len(phase.partitions) for phase in phases}
    copies = page_tables(section(shown.page, "copies"))
    counts = [sum(leading(row[heads.index("copies")]) for row in rows) for heads, rows in copies if "copies" in heads]
    every = [len(rows) for heads, rows in copies if "copied by" in heads]
    told = [leading(n) for n in re.findall(r"([\d,]+) cop(?:y|ies) between devices", text_section(shown, "Copies"))]
    assert counts == every == told
    assert set(counts) == {len(phase.copies) for phase in phases if phase.copies}
    verdict = words(shown.page.one("p", class_="verdict"))
    memcpy = {sum(copy.kind == "memcpy_node" for copy in phase.copies) for phase in phases}
    assert {leading(n) for n in re.findall(r"([\d,]+) Memcpy nodes?", verdict)} == memcpy


def test_experiments_are_counted_once(shown: Shown) -> None:
    probing = shown.report.probing
    if probing is None:
        return
    total = probing.experiments + probing.cached
    sources = {entry.source: entry.covers for entry in shown.report.sources}
    assert re.match(rf"{total} experiments? on ", sources["probe"])
    for part in (text_section(shown, "Fallbacks"), words(section(shown.page, "fallbacks"))):
        assert f"{total}: {probing.experiments} run in " in " ".join(part.split())
    for part in (text_section(shown, "Sources"), words(section(shown.page, "sources"))):
        assert sources["probe"] in " ".join(part.split())


def test_fallbacks_are_counted_alike(shown: Shown) -> None:
    nodes = {entry.node for entry in shown.report.fallbacks}
    if not nodes:
        return
    own = {name for names in counted_rows(shown.report).values() for name in names}
    heading = text_section(shown, "Fallbacks").splitlines()[0]
    about = words(section(shown.page, "fallbacks").one("p", class_="about"))
    assert leading(heading.partition(": ")[2]) == leading(about) == len(own)
    reasons = {(entry.reason, entry.provider) for entry in fallbacks_of(shown.report)}
    groups = [e for e in section(shown.page, "fallbacks").all("article") if re.fullmatch(r"r\d+", e["id"])]
    assert len(groups) == len(reasons)
    listed = {
        words(row.children[0])
        for fold in section(shown.page, "fallbacks").all("details")
        if "with cost" in words(fold.one("summary") if len(fold.all("summary")) == 1 else fold.all("summary")[0])
        for row in fold.one("tbody").all("tr")
    }
    assert listed == {" ".join(name.split()) for name in nodes}
    for group in groups:
        assert words(group.all("h3")[0]) in shown.text


def test_tables_of_operators_and_modules_are_the_same(shown: Shown) -> None:
    phases = phases_of(shown.report)
    if not phases:
        return
    placement = section(shown.page, "placement")
    for head, groups in (("operator", "by_op_type"), ("module", "by_module")):
        rows = {row[0]: row for row in page_table(placement, head)}
        names = {entry.name for phase in phases for entry in getattr(phase, groups)}
        assert set(rows) == {" ".join(name.split()) for name in names}
        for phase in phases:
            for entry in getattr(phase, groups):
                assert f"{entry.nodes:,}" in rows[entry.name][1].split(" / ")
                if shown.timed():
                    assert decimals(entry.host_us_per_run, 1e-3) in rows[entry.name]
        part = text_section(shown, "Placement")
        shown_in_text = {name: cells for name in rows if (cells := text_rows(part, re.escape(name)).get(name))}
        assert len(shown_in_text) >= min(len(rows), 12)
        for name, cells in shown_in_text.items():
            assert cells == [cell for cell in rows[name][1:] if cell], name


def test_the_top_is_the_same(shown: Shown) -> None:
    top = " ".join(shown.text.partition("\n\n")[0].split())
    state = shown.page.one("header").all("p")[1]
    assert state["class"].startswith("state ") and " ".join("".join(state.texts).split()) in top
    assert words(shown.page.one("p", class_="request")) in top
    assert words(shown.page.one("p", class_="verdict")).removesuffix(".") in top
