"""HTML view in a real browser: rendering, navigation, printing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.partition_reports import pages
from tests.partition_reports.chromium import Tab, chromium, find_chromium
from tests.partition_reports.report_changes import mixed
from tests.partition_reports.reports import recorded
from tests.partition_reports.samples import shown

SECTIONS = (
    "phases",
    "fallbacks",
    "placement",
    "copies",
    "nodes",
    "checks",
    "sources",
    "request",
    "machine",
)
REPORTS = {
    "mixed": mixed,
    "cpu": pages.cpu_report,
    "deep": lambda: pages.deep_report(layers=4, repeats=1),
    "large": pages.deep_report,
    "hostile": pages.hostile_report,
    "control": lambda: pages.hostile_report(pages.CONTROL),
    "long": lambda: pages.hostile_report("x" * 3000),
    "webgpu": lambda: recorded("webgpu"),
    "openvino": lambda: recorded("openvino"),
    "dry": lambda: recorded("cuda_dry_run"),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    require("chromium", find_chromium() is not None)
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in REPORTS.items():
        (folder / f"{name}.html").write_text(shown(make(), "html"), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in REPORTS}


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """The tab with its usual settings; what a page complained about fails the test."""
    browser.problems.clear()
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
    yield browser
    assert browser.problems == []


def hidden(tab: Tab, *selectors: str) -> list[str]:
    """Those of the selectors that show nothing."""
    shows = "(e => e.checkVisibility({visibilityProperty: true}) && e.getBoundingClientRect().height > 0)"
    return [each for each in selectors if not tab.run(f"{shows}(document.querySelector({each!r}))")]


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [360, 1440])
def test_page_renders_without_horizontal_scrolling(tab: Tab, files: dict[str, Path], name: str, width: int) -> None:
    tab.open(files[name], width=width, height=800)
    assert hidden(tab, "h1", ".state", "#top", ".map table", *(f"#{each}" for each in SECTIONS)) == []
    assert tab.run("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
    assert tab.run("window.hacked === undefined && document.images.length === 0")


def test_button_steps_through_fallback_nodes(tab: Tab, files: dict[str, Path]) -> None:
    tab.prefer(prefers_reduced_motion="reduce")
    tab.open(files["deep"], width=360, height=800)
    seen = []
    for _ in range(4):
        tab.run("document.getElementById('next-fallback').click()")
        tab.run("new Promise(done => setTimeout(done, 50))")
        seen.append(tab.run("document.querySelector('tr:target').textContent"))
        assert 0 <= tab.run("document.querySelector('tr:target').getBoundingClientRect().top") < 800
    assert len(set(seen)) == 4 and all("Attention" in name for name in seen)


def test_link_into_collapsed_table_expands_it(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["deep"], width=1440, height=900)
    assert not tab.run("document.querySelector('#nodes details').open")
    tab.run("document.querySelector('.map .cell a').click()")
    tab.run("new Promise(done => setTimeout(done, 100))")
    assert tab.run("document.querySelector('#nodes details').open")
    assert tab.run("document.querySelector('tr:target').getBoundingClientRect().height") > 0


def test_page_is_readable_without_javascript(tab: Tab, files: dict[str, Path]) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(files["deep"], width=1440, height=900)
    # The protocol still runs what the test asks.
    assert not tab.run("document.documentElement.classList.contains('js')")
    assert hidden(tab, ".state", ".map table", *(f"#{each}" for each in SECTIONS)) == []
    assert hidden(tab, "#next-fallback") == ["#next-fallback"]
    tab.run("document.querySelector('#nodes details > summary').click()")
    assert hidden(tab, "#nodes table") == []
