"""Generated pages and schemas are up to date, and reading a report imports no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from partita.partition_reports.records import Report
from tests.conftest import REPOSITORY
from tools import support_tables
from tools.published import PAGES

DOCS = REPOSITORY / "docs"
AGAIN = "write it again with: python -m tools.published docs"


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), AGAIN


def test_every_docs_schema_is_generated():
    assert {path.name for path in DOCS.glob("*.schema.json")} == {name for name in PAGES if name.endswith(".json")}


def test_schema_page_names_every_section():
    page = (DOCS / "report-schema.md").read_text(encoding="utf-8")
    for section in Report.model_json_schema()["properties"]:
        assert f"`{section}`" in page, section


@pytest.mark.parametrize("module", ["build", "storage", "sections.report"])
def test_report_modules_import_no_heavy_library(module):
    heavy = ("torch", "onnxruntime", "transformers", "onnx", "numpy")
    code = f"import sys, partita.partition_reports.{module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The pages of docs/support


@pytest.mark.parametrize("name", support_tables.TABLES)
def test_support_page_matches_its_tables(name: str) -> None:
    written = (support_tables.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert written == support_tables.page(name), "write it again with: python -m tools.support_tables --pages"
