"""`python -m benchmarks.passes`: what is exported, what is timed, and how it is told. Nothing is timed here."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import passes
from benchmarks.passes import ALL, FILE, Left, arguments, lines, packages, ratio, record
from partita.errors import UsageError


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What was exported: without `views` nothing can be, and without `tied_head` the graph is the same."""
    made: list[str | None] = []

    def export(
        checkpoint: Path, out: Path, asked: argparse.Namespace, without: str | None
    ) -> tuple[dict[str, int], str]:
        made.append(without)
        if without == "views":
            return {}, "partita: it does not open"
        out.mkdir()
        (out / FILE).write_bytes(b"graph" if without in (None, "tied_head") else b"other")
        return {"fused_norms": 5}, ""

    monkeypatch.setattr(passes, "export", export)
    monkeypatch.setattr(passes, "optimised", lambda package: (24 if package.name == ALL else 58, 10.0))
    return made


def test_every_pass_is_left_out_once(exports: list[str | None], tmp_path: Path) -> None:
    found = {each.name: each for each in packages(tmp_path, tmp_path, arguments([]))}
    assert exports[0] is None and exports[1:] == list(found)[1:] and "write_after_read" not in found
    assert found["fused_norms"].places == 5 and not found["fused_norms"].same and found["fused_norms"].nodes == 58
    assert found["tied_head"].same and found["views"].failed
    rows = lines(list(found.values()))
    assert any("views" in row and "it does not open" in row for row in rows)
    assert any(row.startswith("tied_head") and row.endswith("the same graph") for row in rows)
    with pytest.raises(UsageError, match="`without_pass=vews`: there is no such pass"):
        packages(tmp_path, tmp_path, arguments(["--passes", "vews"]))


def test_ratios_are_of_turns_of_the_same_round(tmp_path: Path) -> None:
    """A machine that slows down slows both down."""
    whole = Left(ALL, nodes=24, nodes_per_layer=10, prefill_ms=[10, 20, 40], decode_ms=[1, 2, 4])
    other = Left("views", nodes=40, nodes_per_layer=18, prefill_ms=[15, 30, 60], decode_ms=[1, 4, 8])
    assert ratio(other.prefill_ms, whole.prefill_ms) == 1.5 and ratio(other.decode_ms, whole.decode_ms) == 2
    assert ratio([], []) is None
    assert lines([whole, other])[2].split() == ["views", "40", "18.0", "4.00", "2.000", "30.00", "1.500"]
    kept = record([whole, other], arguments([str(tmp_path)]))
    assert kept["packages"][1]["decode_ratio"] == 2 and kept["options"]["checkpoint"] == str(tmp_path)
