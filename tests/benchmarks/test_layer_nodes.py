"""The table of nodes before and after the passes: every lowering and precision twice, and what could not be counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import layer_nodes
from benchmarks.layer_nodes import FORMS, Count, main, told
from partita.export.passes import optional


def test_every_form_is_counted_without_the_passes_and_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, int, str | None]] = []

    def export(checkpoint: Path, out: Path, lowering: str, form: Sequence[str], without: Sequence[str]) -> str:
        made.append((lowering, len(without), form[-1] if "--target" in form else None))
        return "it is refused" if "int4" in form else ""

    def counted(package: Path, target: str, webgpu: Path) -> Count:
        assert made[-1][2] == (None if target == "webgpu" else target), "of a package that was written for it"
        return None if target == "webgpu" else (40.0 if made[-1][1] else 10.0, 3.0 if target == "cuda" else 0.0)

    monkeypatch.setattr(layer_nodes, "make", lambda folder, asked: folder.mkdir())
    monkeypatch.setattr(layer_nodes, "export", export)
    monkeypatch.setattr(layer_nodes, "counted", counted)
    main(["--lowerings", "gqa"])
    out, err = capsys.readouterr()
    rows = out.splitlines()
    assert rows[0] == "| lowering | precision | cpu | cuda | webgpu |" and len(rows) == 2 + len(FORMS)
    assert "| gqa | fp32 | 40 → 10 | 40 → 10 (3 on the CPU) | ? → ? |" in rows
    assert "| gqa | int4 | ? → ? | ? → ? | ? → ? |" in rows and "? → ?, it is refused, it is refused" in err
    for asked in ("cpu", "cuda", None):
        assert made.count(("gqa", len(optional()), asked)) == len(FORMS), "int4 is not tried a second time"
        assert made.count(("gqa", 0, asked)) == len(FORMS) - 1


def test_a_cell() -> None:
    assert told((47.0, 0.0), (10.5, 0.0)) == "47 → 10.5"
    assert told(None, (10.0, 2.0)) == "? → 10 (2 on the CPU)"
