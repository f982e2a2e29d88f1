"""The pages of docs/support are what their tables give."""

from __future__ import annotations

import pytest

from tools import support_tables


@pytest.mark.parametrize("name", support_tables.TABLES)
def test_a_page_is_made_from_its_tables(name: str) -> None:
    written = (support_tables.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert written == support_tables.page(name), "write it again with: python -m tools.support_tables --pages"
