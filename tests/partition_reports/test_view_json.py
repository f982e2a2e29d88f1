"""Report files: round trip, whole or not at all, and one line on everything that can be wrong with one."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from partita.errors import ReportError, UsageError
from partita.partition_reports.views import json as json_view
from partita.partition_reports.views.base import load_view, view_names
from tests.partition_reports.samples import GPU_CHAIN, mixed_facts, recorded_facts, report_of


@pytest.fixture(scope="module")
def report():
    return report_of(mixed_facts(), GPU_CHAIN)


@pytest.fixture
def stored(report, tmp_path):
    path = tmp_path / "report.json"
    json_view.write(report, path)
    return path


def refusal(path):
    with pytest.raises(ReportError) as caught:
        json_view.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def changed(path, change):
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return refusal(path)


@pytest.mark.parametrize("facts", [recorded_facts(), mixed_facts()], ids=["recorded", "mixed"])
def test_what_is_written_is_what_is_read(facts, tmp_path):
    report = report_of(facts, GPU_CHAIN)
    json_view.write(report, tmp_path / "r.json")
    assert json_view.read(tmp_path / "r.json") == report
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == json_view.to_text(report)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "no temporary file is left"


def test_the_schema_comes_first(stored):
    assert next(iter(json.loads(stored.read_text(encoding="utf-8")))) == "schema"


def test_an_old_report_is_replaced(report, stored):
    json_view.write(report.model_copy(update={"created": "later"}), stored)
    assert json_view.read(stored).created == "later"


def test_others_may_read_a_report_as_far_as_the_umask_says(report, tmp_path):
    before = os.umask(0o022)
    try:
        json_view.write(report, tmp_path / "r.json")
    finally:
        os.umask(before)
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o644


def test_an_unwritable_place_is_one_line_and_leaves_nothing(report, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing" / "r.json", tmp_path / "folder", tmp_path / "file" / "r.json"):
        with pytest.raises(ReportError, match="cannot write the report") as caught:
            json_view.write(report, path)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_failed_write_keeps_the_old_report(report, stored, monkeypatch):
    before = stored.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="No space left on device"):
        json_view.write(report, stored)
    assert stored.read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def test_a_link_is_written_through(report, stored, tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(stored)
    json_view.write(report.model_copy(update={"created": "later"}), link)
    assert link.is_symlink()
    assert json_view.read(stored).created == "later"


def test_missing_folder_and_directory(tmp_path):
    assert refusal(tmp_path / "none.json").startswith("no such file")
    assert refusal(tmp_path).startswith("cannot read the report")


def test_bytes_that_are_no_text(stored):
    stored.write_bytes(b"\xff\xfe" + stored.read_bytes())
    assert "byte 0 is not UTF-8" in refusal(stored)


def test_cut_off_at_any_place(stored):
    whole = stored.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        stored.write_bytes(whole[:size])
        assert "damaged or cut off" in refusal(stored)


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, "{]"], ids=["deep", "long number", "bracket"])
def test_json_that_cannot_be_parsed(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    assert "damaged or cut off" in refusal(tmp_path / "r.json")


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"schema": 1}', '{"schema": null}'])
def test_json_that_is_no_report(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    assert refusal(tmp_path / "r.json").startswith("not a partition report, it has no schema field")


def test_another_schema(stored):
    newer = changed(stored, lambda raw: raw.update(schema="partita.report/2"))
    assert newer == "schema is 'partita.report/2', this Partita reads 'partita.report/1'; use the Partita that wrote it"
    other = changed(stored, lambda raw: raw.update(schema="partita.package/1"))
    assert other.startswith("not a partition report, its schema is 'partita.package/1'")


def test_a_field_that_is_wrong_missing_or_unknown_is_named(stored):
    original = stored.read_text(encoding="utf-8")

    def refused(change):
        stored.write_text(original, encoding="utf-8")
        return changed(stored, change)

    assert "'phases.1.nodes.0.position'" in refused(lambda raw: raw["phases"][1]["nodes"][0].update(position="first"))
    assert "'memory.peak_rss_bytes': Field required" in refused(lambda raw: raw["memory"].pop("peak_rss_bytes"))
    assert "'totals.colour': Extra inputs" in refused(lambda raw: raw["totals"].update(colour="blue"))
    assert "'totals.finish_reason'" in refused(lambda raw: raw["totals"].update(finish_reason="bored"))
    assert "(and 1 more)" in refused(lambda raw: raw["totals"].update(a=1, b=2))
    assert "\\n" in refused(lambda raw: raw.update({"a\nb": 1})), "a key cannot break the line"
    nan = refused(lambda raw: raw["totals"].update(session_load_seconds=float("nan")))
    assert "'totals.session_load_seconds'" in nan


def test_a_number_that_is_none_never_gets_into_a_report():
    facts = recorded_facts()
    with pytest.raises(ValueError, match="finite"):
        report_of(replace(facts, tokenizer_load_seconds=float("nan")))


def test_views_are_found_by_file_name():
    assert {"json", "text"} <= set(view_names())
    for name in view_names():
        view = load_view(name)
        assert view.name == name
        assert view.suffix.startswith(".")
        if view.takes == ("report",):
            assert view.to_text(report_of(recorded_facts())).endswith("\n")


def test_an_unknown_view_is_a_usage_error():
    with pytest.raises(UsageError, match=r"no view is called 'pie'; there are: .*json"):
        load_view("pie")
