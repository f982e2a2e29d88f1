"""Fixtures of the tests of quantised packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.demo import heldout_path


@pytest.fixture(scope="session")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of the embedded text, enough to measure quality on."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(heldout_path().read_text(encoding="utf-8")[:1500], encoding="utf-8")
    return path
