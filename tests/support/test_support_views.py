"""The views of a support table, its published schema, and that it loads back unchanged."""

from __future__ import annotations

import json

import jsonschema
import pytest

from partita.partition_reports import storage
from partita.partition_reports.render.show import load_view
from partita.support.records import SCHEMA, SupportTable
from tests.conftest import REPOSITORY
from tests.support.tables import answer, form, table

VIEWS = "partita.support.sections"
FLOAT, HALF = "T=tensor(float)", "T=tensor(float16)"
PUBLISHED = REPOSITORY / "docs" / "support.schema.json"


@pytest.fixture(name="made")
def make() -> SupportTable:
    return table(
        answer("Resize", "supported", FLOAT),
        answer("Resize", "rejected", HALF, message="kernel not found"),
        form("Resize", "supported", "mode=linear"),
        form("Resize", "rejected", "mode=cubic"),
        answer("Gelu", "rejected", FLOAT, domain="com.microsoft", since=1),
        answer("Old", "untested", FLOAT),
        without_example=("Scale-1",),
        complete=False,
    )


@pytest.mark.parametrize("view", ("html", "json", "markdown", "text"))
def test_every_view_shows_operators_types_and_provider_version(made, view):
    text = load_view(view, VIEWS).to_text(made)
    for told in ("float16", "mode=cubic", "com.microsoft", "Scale-1", "onnxruntime-webgpu 1.27.0", "kernel not found"):
        assert told in text, (view, told)


def test_json_table_round_trips_and_matches_published_schema(made, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(load_view("json", VIEWS).to_text(made), encoding="utf-8")
    assert storage.read_one_of(path, {SCHEMA: SupportTable}) == made
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), json.loads(PUBLISHED.read_text(encoding="utf-8")))


def test_text_view_of_many_operators_shows_newest_versions_only():
    many = [answer(f"Op{number}", "supported", FLOAT, since=since) for number in range(9) for since in (9, 13)]
    made = table(*many)
    assert "Op3-9" not in load_view("text", VIEWS).to_text(made)
    assert "Op3-9" in load_view("markdown", VIEWS).to_text(made)
