"""The support table: built from outcomes, its texts, views and published schema, and the comparison of two tables."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from partita.cli import run
from partita.compare.packages import compare_tables as compare
from partita.partition_reports import storage
from partita.partition_reports.render.show import load_view
from partita.support.build import deciding_factors, support_level
from partita.support.records import SCHEMA, Assignments, Condition, ModelNeed, SupportTable
from partita.support.sections import refused_text, supported_text
from tests.conftest import REPOSITORY
from tests.support.tables import answer, form, table

FLOAT, HALF, WHOLE = "T=tensor(float)", "T=tensor(float16)", "T=tensor(int64)"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["supported", "invalid"], "supported"),
        (["supported", "rejected"], "partly"),
        (["supported", "failed"], "partly"),
        (["rejected", "invalid", "untested"], "rejected"),
        (["crashed"], "rejected"),
        (["invalid"], "invalid"),
        (["invalid", "untested"], "untested"),
    ],
)
def test_invalid_outcomes_do_not_affect_support_level(outcomes, expected):
    assert support_level(answer("Cast", outcome, FLOAT) for outcome in outcomes) == expected


def test_types_are_grouped_by_outcome_and_forms_are_separate():
    made = table(
        answer("Cast", "supported", FLOAT),
        answer("Cast", "rejected", HALF, message="no kernel"),
        answer("Cast", "invalid", WHOLE),
        form("Cast", "supported", "mode=a"),
        form("Cast", "rejected", "mode=b", message="no kernel"),
        untested_counts=((("", "Cast", 13), 7),),
    )
    (entry,) = made.operators
    (version,) = entry.versions
    assert version.types.supported == (("float32",),)
    assert version.types.rejected == (("float16",),)
    assert version.types.invalid == (("int64",),)
    assert version.types.beyond_limit == 7
    assert [condition.factors for condition in version.conditions] == [("mode=b",)]
    assert [(said.text, said.variants) for said in version.messages] == [("no kernel", 2)]
    assert [made.variants[each] for each in ("supported", "rejected", "invalid")] == [2, 2, 1]


def test_rejected_type_explains_form_before_attributes():
    half = answer("Cast", "rejected", "T=tensor(float16)", kind="form", factors=frozenset({"saturate=0"}))
    plain = form("Cast", "supported", "saturate by default")
    told = table(answer("Cast", "rejected", HALF), plain, half).operators[0].newest
    assert (told.conditions, told.unexplained) == ((), 0)
    untold = table(plain, half).operators[0].newest
    assert [condition.factors for condition in untold.conditions] == [("T float16", "saturate=0")]


def test_absent_optional_input_has_empty_type():
    made = table(answer("Clip", "supported", FLOAT, "T2=tensor(float)"), answer("Clip", "supported", FLOAT))
    assert made.operators[0].newest.types.supported == (("float32", "float32"), ("float32", ""))


def test_operator_versions_are_sorted_with_newest_last():
    made = table(answer("Cast", "supported", FLOAT, since=13), answer("Cast", "rejected", FLOAT, since=9, until=12))
    assert [version.since for version in made.operators[0].versions] == [9, 13]
    assert made.operators[0].newest.since == 13


@pytest.mark.parametrize(
    ("kind", "expected"), [(FLOAT, "supported"), (HALF, "rejected"), ("T=tensor(bool)", "untested")]
)
def test_model_operators_get_outcome_of_their_types(kind, expected):
    name, _, text = kind.partition("=")
    made = table(
        answer("Cast", "supported", FLOAT),
        answer("Cast", "rejected", HALF),
        model_nodes=(ModelNeed(domain="", operator="Cast", since=13, types={name: text}, nodes=4),),
    )
    assert [(need.nodes, need.outcome) for need in made.model_operators] == [(4, expected)]


@pytest.mark.parametrize(
    ("taken", "others", "found", "unexplained"),
    [
        (
            ["mode=linear, rank 4", "mode=nearest, rank 3"],
            ["mode=cubic, rank 4", "mode=cubic, rank 3"],
            [(("mode=cubic",), 2)],
            0,
        ),
        (["mode=linear"], ["mode=cubic, with roi"], [(("mode=cubic", "with roi"), 1)], 0),
        (["a=1, b=1"], ["a=2, b=1", "a=1, b=2", "a=2, b=2"], [(("a=2",), 2), (("b=2",), 1)], 0),
        (["a=1, b=2", "a=2, b=1"], ["a=1, b=1"], [], 1),
        ([], ["a=1", "a=2"], [], 0),
    ],
)
def test_deciding_factors_are_smallest_sets_absent_from_supported_forms(taken, others, found, unexplained):
    def forms(texts: list[str]) -> list[frozenset[str]]:
        return [frozenset(text.split(", ")) for text in texts]

    wanted = tuple(Condition(factors=factors, forms=count) for factors, count in found)
    assert deciding_factors(forms(taken), forms(others)) == (wanted, unexplained)


# Types in words

ROWS = tuple((a, b) for a in ("float32", "float16") for b in ("int32", "int64"))
ODD, EVEN = (
    tuple(
        (x, y, z) for x in "abcdefgh" for y in "abcdefgh" for z in "abcdefgh" if (ord(x) + ord(y) + ord(z)) % 2 == odd
    )
    for odd in (1, 0)
)


@pytest.mark.parametrize(
    ("variables", "outcomes", "supported", "refused"),
    [
        ("T", {"supported": (("float32",), ("int8",))}, "all: float32, int8", ""),
        ("T", {"rejected": (("float32",), ("int8",))}, "none", "float32, int8"),
        ("T", {"supported": (("float32",),), "untested": (("int8",),)}, "float32", ""),
        (
            "TI",
            {"supported": ROWS, "rejected": (("float64", "int32"), ("float64", "int64"))},
            "T: float32, float16; I: int32, int64",
            "the other 2 combinations",
        ),
        (
            "TU",
            {"supported": (("a", "x"), ("b", "x"), ("b", "y")), "rejected": (("a", "y"),)},
            "T a with U x; T b with U x, y",
            "the other 1 combination",
        ),
        (
            "TU",
            {"supported": (("a", "a"), ("b", "b")), "rejected": (("a", "b"), ("b", "a"))},
            "T = U: a, b",
            "the other 2 combinations",
        ),
        (
            "ABC",
            {"supported": ODD, "rejected": EVEN},
            "256 of 512 combinations of A, B, C",
            "the other 256 combinations",
        ),
        (("T", "tensor(int64)"), {"supported": (("float32", "int64"),)}, "float32", ""),
    ],
)
def test_types_are_described_by_the_shortest_exact_text(
    variables: Any, outcomes: dict[str, Any], supported: str, refused: str
) -> None:
    types = Assignments(variables=tuple(variables), **outcomes)
    assert (supported_text(types), refused_text(types)) == (supported, refused)


# Views

VIEWS = "partita.support.sections"
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


# Comparison

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
        (tmp_path / name).write_text(storage.to_json(table(answer("Cast", outcome, FLOAT))))
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
