"""docs/passes.md is what the passes say of themselves, and `export --explain` says the same in a line each."""

from __future__ import annotations

from pathlib import Path

from partita.commands.export import pass_lines
from partita.export.passes import ORDER
from tests.conftest import REPOSITORY
from tools.passes_page import main, page


def test_the_page_is_current(tmp_path: Path) -> None:
    main(tmp_path)
    written = (tmp_path / "passes.md").read_text(encoding="utf-8")
    assert written == page()
    current = (REPOSITORY / "docs" / "passes.md").read_text(encoding="utf-8")
    assert current == written, "write it again with: python -m tools.passes_page docs"


def test_explain_names_every_pass_with_its_places() -> None:
    lines = pass_lines({each.name: number for number, each in enumerate(ORDER)})
    assert len(lines) == len(ORDER) + 1
    assert lines[0].startswith("  passes")
    for number, (each, line) in enumerate(zip(ORDER, lines[1:], strict=True)):
        assert each.name in line and each.summary in line
        assert f" {number} " in line, "how many places, none included"


def test_explain_says_when_another_exporter_ran_no_passes() -> None:
    assert pass_lines({}) == ["  passes      none: the graphs come from another exporter"]
