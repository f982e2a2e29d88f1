"""HTML view: single file without external resources, complete, and safe with hostile names."""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from pathlib import Path

import pytest

from partita.cli import run
from partita.partition_reports import storage
from tests.partition_reports import pages
from tests.partition_reports.html_tree import Element, read, section, words
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.reports import REPORTS as OTHERS
from tests.partition_reports.samples import shown

LARGEST_PAGE = 2_000_000


REPORTS = {
    **OTHERS,
    "deep": lambda: pages.deep_report(layers=3, repeats=1),
    "hostile": pages.hostile_report,
    "control characters": lambda: pages.hostile_report(pages.CONTROL),
}


@pytest.fixture(scope="module", params=REPORTS)
def page(request: pytest.FixtureRequest) -> str:
    return shown(REPORTS[request.param](), "html")


@pytest.fixture(scope="module")
def deep() -> Element:
    return read(shown(pages.deep_report(layers=3, repeats=1), "html"))


# one file, harmless


def test_page_loads_no_resources_and_runs_only_its_own_script(page: str) -> None:
    root = read(page)
    assert {e["href"][:1] for e in root.all() if "href" in e.attributes} == {"#"}
    for name in ("src", "srcset", "data", "action", "formaction", "poster", "background", "xlink:href", "style"):
        assert not [e.tag for e in root.all() if name in e.attributes]
    assert not root.all("link", "base", "img", "iframe", "object", "embed", "form", "audio", "video", "use", "image")
    assert not [name for e in root.all() for name in e.attributes if name.startswith("on")]
    style, script = (root.one(tag).texts[0] for tag in ("style", "script"))
    assert "url(" not in style
    assert len(script.splitlines()) <= 100
    assert "@import" not in style and "http" not in style + script
    assert "innerHTML" not in script and "eval" not in script and "document.write" not in script


def test_csp_allows_only_hashed_style_and_script(page: str) -> None:
    root = read(page)
    policy = root.one("meta", **{"http-equiv": "Content-Security-Policy"})["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for tag in ("style", "script"):
        digest = hashlib.sha256(root.one(tag).texts[0].encode()).digest()
        assert rules.pop(f"{tag}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert not rules
    head = page[: page.index("<style>")]
    assert "Content-Security-Policy" in head, "a policy holds for what comes after it"


def test_hostile_text_is_escaped() -> None:
    root = read(shown(pages.hostile_report(), "html"))
    assert len(root.all("script")) == len(root.all("style")) == 1
    for name in ("fallbacks", "nodes", "copies", "sources", "request", "machine", "checks"):
        assert "onerror=window.hacked" in section(root, name).text, name
    titles = [e["title"] for e in section(root, "placement").all("a") if e["title"]]
    assert titles and all(pages.HOSTILE in title for title in titles if "Memcpy" not in title)
    assert pages.HOSTILE in root.one("title").text and "49" not in root.one("h1").text


def test_control_and_bidirectional_characters_are_replaced() -> None:
    page = shown(pages.hostile_report(pages.CONTROL), "html")
    found = {mark for mark in page if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}
    assert found == {"\n"}, found
    assert "a?b?c?d?[31me?f?g?h" in page
    page.encode()


# structure


def test_ids_are_unique_and_links_have_targets(page: str) -> None:
    root = read(page)
    ids = [e["id"] for e in root.all() if e["id"]]
    assert len(ids) == len(set(ids))
    targets = {e["href"][1:] for e in root.all("a")} | {e["aria-labelledby"] for e in root.all("section")} - {""}
    assert targets <= set(ids), targets - set(ids)


def test_landmarks_and_heading_levels_are_correct(page: str) -> None:
    root = read(page)
    assert root.one("html")["lang"] == "en" and root.one("title").text.strip()
    body = root.one("body")
    assert [e.tag for e in body.children if e.tag in ("header", "nav", "main", "footer")] == [
        "header",
        "nav",
        "main",
        "footer",
    ]
    assert body.children[0]["href"] == "#main"
    levels = [int(e.tag[1]) for e in root.all("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert all(e["aria-labelledby"] or e["aria-label"] for e in root.all("section"))


def test_tables_have_captions_and_scopes(page: str) -> None:
    root = read(page)
    for found in root.all("table"):
        assert words(found.one("caption"))
        assert all(e["scope"] in ("row", "col") for e in found.all("th"))
        heads = found.one("thead").all("th")
        assert all(words(e) for e in heads), "an empty heading tells nothing to who hears it"
        for row in found.one("tbody").all("tr"):
            assert len([e for e in row.children if e.tag in ("th", "td")]) == len(heads)
            assert len([e for e in row.children if e["scope"] == "row"]) == 1


# content


def test_layer_map_lists_each_node_once_per_phase_in_order(deep: Element) -> None:
    table = section(deep, "placement").all("table")[0]
    titles = [words(row.children[0]) for row in table.one("tbody").all("tr")]
    assert titles == ["before the layers", "layer 0", "layer 1", "layer 2", "after the layers"]
    for column in (1, 2):
        cells = [row.children[column] for row in table.one("tbody").all("tr")]
        links = [link["href"] for cell in cells for link in cell.all("a")]
        assert links == [f"#n0-{position}" for position in range(len(pages.layer_nodes(3, 1)))]
    layer = table.one("tbody").all("tr")[1].children[1]
    assert "1 fallback" in words(layer) and "on CPU: Attention 1" in words(layer)
    signs = [words(link) for link in layer.all("a")]
    assert signs == ["", "", "", "", "", "", "", "", "↑", "2", "↓", "", "", "", "", "", ""]
    assert layer.all("a")[9]["title"].endswith("(Attention) on CPU")


def test_page_of_32_layer_model_is_below_size_limit() -> None:
    report = pages.deep_report()
    assert len(report.phases[0].nodes) > 1500
    assert len(shown(report, "html").encode()) < LARGEST_PAGE


# the verb


def test_page_is_written_next_to_the_report_or_to_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, target = tmp_path / "run.json", tmp_path / "page.html"
    storage.write(mixed(), stored)
    page = shown(mixed(), "html")
    assert run(["report", "html", str(stored), "--out", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == page and not stored.with_suffix(".html").exists()
    assert run(["report", "html", str(stored)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and str(stored.with_suffix(".html")) in captured.err.replace("\n", "")
    assert stored.with_suffix(".html").read_text(encoding="utf-8") == page
    assert run(["report", "html", str(stored), "--out", str(tmp_path / "no" / "x.html")]) == 1
    error = capsys.readouterr().err
    assert "not exist" in error and error.count("\n") == 1
