"""Report files: round trip, atomic writes and one-line errors for invalid files."""

from __future__ import annotations

import json
import os

import pytest

from partita.errors import ReportError
from partita.partition_reports import storage
from tests.partition_reports.samples import GPU_CHAIN, mixed_facts, recorded_facts, report_of


@pytest.fixture(scope="module")
def report():
    return report_of(mixed_facts(), GPU_CHAIN)


@pytest.fixture
def stored(report, tmp_path):
    path = tmp_path / "report.json"
    storage.write(report, path)
    return path


def refusal(path):
    with pytest.raises(ReportError) as caught:
        storage.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("facts", [recorded_facts(), mixed_facts()], ids=["recorded", "mixed"])
def test_report_round_trips_through_file(facts, tmp_path):
    report = report_of(facts, GPU_CHAIN)
    storage.write(report, tmp_path / "r.json")
    assert storage.read(tmp_path / "r.json") == report
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == storage.to_json(report)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "no temporary file is left"


def test_unwritable_path_raises_single_line_error_without_file(report, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing" / "r.json", tmp_path / "folder", tmp_path / "file" / "r.json"):
        with pytest.raises(ReportError, match="cannot write the report") as caught:
            storage.write(report, path)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_failed_write_keeps_existing_report(report, stored, monkeypatch):
    before = stored.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="No space left on device"):
        storage.write(report, stored)
    assert stored.read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (text, "invalid JSON, damaged or truncated")
            for text in (b"\xff\xfe{}", b"", b"[" * 100_000, b"1" * 5000, b"{]", b"{")
        ),
        *(
            (text, "not a partition report, it has no schema field")
            for text in (b"[]", b"3", b"null", b"{}", b'{"schema": 1}', b'{"schema": null}')
        ),
        (b'{"schema": "partita.package/1"}', "not a partition report, its schema is 'partita.package/1'"),
        (
            b'{"schema": "partita.report/2"}',
            "schema is 'partita.report/2', this version reads 'partita.report/1'",
        ),
    ],
    ids=range(14),
)
def test_non_report_file_is_rejected(tmp_path, content, message):
    (tmp_path / "r.json").write_bytes(content)
    assert refusal(tmp_path / "r.json").startswith(message)


def test_missing_directory_and_large_file_are_rejected(stored, tmp_path):
    assert refusal(tmp_path / "none.json").startswith("no such file")
    assert refusal(tmp_path).startswith("cannot read the report")
    with stored.open("r+b") as file:
        file.truncate(300 << 20)
    assert "314,572,800 bytes, above the limit of 268,435,456 bytes" in refusal(stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["phases"][1]["nodes"][0].update(position="first"), "'phases.1.nodes.0.position'"),
        (lambda raw: raw["memory"].pop("peak_rss_bytes"), "'memory.peak_rss_bytes': Field required"),
        (lambda raw: raw["totals"].update(finish_reason="bored"), "'totals.finish_reason'"),
        (lambda raw: raw["totals"].update(new_tokens="many", prompt_tokens="few"), "(and 1 more)"),
        (lambda raw: raw["environment"]["packages"].update({"a\nb": 1}), "\\n"),  # a key cannot break the line
        (lambda raw: raw["totals"].update(session_load_seconds=float("nan")), "'totals.session_load_seconds'"),
    ],
)
def test_invalid_or_missing_field_is_named(stored, change, said):
    raw = json.loads(stored.read_text(encoding="utf-8"))
    change(raw)
    stored.write_text(json.dumps(raw), encoding="utf-8")
    assert said in refusal(stored)


@pytest.mark.parametrize("facts", [recorded_facts(), mixed_facts()], ids=["recorded", "mixed"])
def test_unknown_fields_are_ignored_when_reading(facts, tmp_path):
    made = report_of(facts, GPU_CHAIN)
    newer = json.loads(storage.to_json(made))
    phase = newer["phases"][0]
    records = (newer, newer["memory"], newer["chain"][0], *newer["checks"], phase, *phase["nodes"], *phase["by_layer"])
    for record in records:
        record["of_tomorrow"] = {"a": [1, None]}
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(newer))
    assert storage.read(path) == made


def test_report_is_ascii_and_preserves_unicode_names(report, tmp_path):
    """ASCII keeps names distinct on a stdout encoding that lacks characters."""
    name = "層1/\u202e𝄞é\x7f\n"
    named = report.model_copy(update={"notes": (*report.notes, name)})
    text = storage.to_json(named)
    assert text.isascii() and "\x7f" not in text
    storage.write(named, tmp_path / "r.json")
    assert storage.read(tmp_path / "r.json").notes[-1] == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"partita_version": 1' + "0" * 400, "more than 64 bits"),
        ('"partita_version": "\\ud800"', "a lone surrogate"),
        ('"partita_version": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_out_of_range_values_are_rejected(stored, text, said):
    written = stored.read_text(encoding="utf-8")
    stored.write_text(written.replace('"partita_version": "0.1.0"', text), encoding="utf-8")
    assert said in refusal(stored)
