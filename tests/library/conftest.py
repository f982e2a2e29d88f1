"""Packages that the tests of the library share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"), attention="gqa")


@pytest.fixture(scope="session")
def pair(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """Of batch size 2."""
    return exported(tiny_checkpoint("llama"), attention="gqa", batch_size=2)
