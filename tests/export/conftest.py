"""Checkpoints that many tests of the export share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import TinyCheckpoint

if TYPE_CHECKING:
    from partita.export.checkpoint.description import Checkpoint


@pytest.fixture
def llama(tiny_checkpoint: TinyCheckpoint, own_copy: Callable[[Path], Path]) -> Path:
    """A copy of the tiny llama checkpoint that a test may change."""
    return own_copy(tiny_checkpoint("llama"))


@pytest.fixture(scope="session")
def opened(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    """A checkpoint with biases, whose weights the graphs of tests use."""
    from partita.export.checkpoint.description import open_checkpoint

    return open_checkpoint(str(tiny_checkpoint("qwen2")))
