"""Files that the pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGES = sorted((*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")), key=lambda page: page.name)
PYTHON = re.compile(r"`([\w/]+\.py)(?::[\w.]+)?`")
PATH = re.compile(r"`((?:partita|tests|tools|docs|benchmarks)/[\w/.-]+)`")


def absent(text: str) -> list[str]:
    """Paths that a text has in backquotes and the repository has not; those of modules may lack their first folders."""
    files = {f"/{path.relative_to(REPOSITORY).as_posix()}" for path in modules()}
    lost = [name for name in PYTHON.findall(text) if not any(file.endswith(f"/{name}") for file in files)]
    return lost + [name for name in PATH.findall(text) if not (REPOSITORY / name).exists()]


def modules() -> list[Path]:
    """Every module of the repository."""
    return [
        path for folder in ("partita", "tests", "tools", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path):
    assert absent(page.read_text(encoding="utf-8")) == []


def test_a_file_that_is_gone_is_found():
    assert absent("`partition_reports/probes.py`, `docs/nothing.md` and `cli.py`") == [
        "partition_reports/probes.py",
        "docs/nothing.md",
    ]


def test_the_index_lists_every_page():
    folder = REPOSITORY / "docs"
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_list_follows_an_empty_line(page: Path):
    """The site renders a list without one as a part of the paragraph above it."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?!\s|[-*#<]|\d+\. ).+\n(?:[-*]|\d+\.) .*", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: Path):
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
