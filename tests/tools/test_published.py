"""Generated pages and schemas are up to date, and reading a report imports no heavy library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from partita.diagnosis.reasons import REASONS
from partita.partition_reports.records import Report
from tests.conftest import REPOSITORY
from tests.partition_reports.samples import GPU_CHAIN, mixed_facts, report_of
from tools import support_tables
from tools.published import PAGES, main, reasons_text

DOCS = REPOSITORY / "docs"
AGAIN = "write it again with: python -m tools.published docs"


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), AGAIN


def test_every_docs_schema_is_generated():
    assert {path.name for path in DOCS.glob("*.schema.json")} == {name for name in PAGES if name.endswith(".json")}


def test_reasons_page_has_every_reason():
    for reason in REASONS.values():
        assert f"\n## {reason.code}\n" in reasons_text()


def test_reasons_page_states_probe_time_limits_and_cache_variable():
    from partita.files import CACHE_VARIABLE
    from partita.options.placement import PlaceOptions
    from partita.runtime.lab.laboratory import MODEL_SECONDS, PATIENCE, START_SECONDS

    page = " ".join(reasons_text().split())
    assert f"After `--probe-seconds` (default {PlaceOptions.probe_seconds:g}; 0: no experiments)" in page
    late = f"a second try {PATIENCE * MODEL_SECONDS:g}, and the start of the provider {START_SECONDS:g}."
    assert f"An experiment has {MODEL_SECONDS:g} seconds, {late}" in page
    assert f"`{CACHE_VARIABLE}=`" in page


def test_main_writes_every_page(tmp_path):
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)


def test_report_schema_has_every_field():
    schema = Report.model_json_schema(by_alias=True)
    raw = json.loads(report_of(mixed_facts(), GPU_CHAIN).model_dump_json(by_alias=True))
    assert set(raw) == set(schema["properties"])
    for value, record in ((raw["phases"][0], "Phase"), (raw["fallbacks"][0], "Fallback"), (raw["cache"], "Cache")):
        assert set(value) == set(schema["$defs"][record]["properties"])


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
