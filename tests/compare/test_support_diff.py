"""`partita report diff A B`: differences between two support tables, views and usage errors."""

from __future__ import annotations

from partita.cli import run
from partita.compare.packages import compare_tables as compare
from partita.partition_reports.storage import to_json
from tests.support.tables import answer, form, table

FLOAT, HALF, WHOLE = "T=tensor(float)", "T=tensor(float16)", "T=tensor(int64)"
BEFORE = table(
    answer("Cast", "supported", FLOAT),
    answer("Cast", "rejected", HALF),
    answer("Cast", "supported", WHOLE),
    form("Cast", "supported", "mode=a"),
    answer("Gone", "supported", FLOAT),
)


def test_diff_counts_lost_gained_and_unmatched_variants():
    after = table(
        answer("Cast", "rejected", FLOAT),
        answer("Cast", "supported", HALF),
        answer("Cast", "untested", WHOLE),
        form("Cast", "crashed", "mode=a"),
        answer("New", "supported", FLOAT),
        package="onnxruntime-webgpu 1.31.0",
    )
    found = compare(BEFORE, after, names=("a", "b"))
    assert {(change.group, change.name, change.effect) for change in found.of("variants")} == {
        ("Cast-13", "T float32", "worse"),
        ("Cast-13", "T float16", "better"),
        ("Cast-13", "mode=a", "worse"),
    }
    assert {(change.name, change.kind) for change in found.of("coverage")} == {
        ("Gone-13", "removed"),
        ("New-13", "added"),
    }
    assert [(each.before, each.after) for each in found.of("versions")] == [
        ("onnxruntime-webgpu 1.27.0", "onnxruntime-webgpu 1.31.0")
    ]
    assert found.headline == (
        "2 variants no longer supported, 1 newly supported, in 1 operator version (3 variants in both tables)"
    )


def test_identical_tables_have_no_difference():
    found = compare(BEFORE, BEFORE, names=("a", "b"))
    assert not found.changes
    assert found.headline.startswith("no difference (5 variants in both tables)")


def test_report_verbs_read_support_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, outcome in (("a.json", "supported"), ("b.json", "rejected")):
        (tmp_path / name).write_text(to_json(table(answer("Cast", outcome, FLOAT))))
    assert run(["report", "diff", "a.json", "b.json", "--exit-code"]) == 1
    assert "Cast-13" in capsys.readouterr().out
    assert run(["report", "diff", "a.json", "b.json", "--out", "d.md"]) == 0
    assert (tmp_path / "d.md").read_text().startswith("### 1 variant no longer supported")
    assert run(["report", "diff", "a.json", "b.json", "--out", "a.json"]) == 2
    assert run(["report", "html", "a.json"]) == 0
    assert "Cast" in (tmp_path / "a.html").read_text()


def test_variants_without_factors_are_compared_separately():
    """Variants of variadic operators such as Max have no factors; a lost variant must still appear."""
    before, after = (
        table(
            form("Max", "supported"),
            form("Max", outcome, difference="rank 4"),
            form("Max", "supported", difference="rank 5"),
        )
        for outcome in ("supported", "rejected")
    )
    (change,) = compare(before, after, names=("a", "b")).changes
    assert (change.name, change.effect) == ("rank 4", "worse")
    same = compare(before, before, names=("a", "b"))
    assert not same.changes and same.headline == "no difference (3 variants in both tables)"
