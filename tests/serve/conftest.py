"""One server for the tests that ask it something and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.cli import run
from tests.conftest import Exported, TinyCheckpoint, require
from tests.serve.serving import SYSTEM, Running, running

NAME = "tiny"


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """Four rows of 128 tokens."""
    require("starlette")
    return exported(tiny_checkpoint("llama"), attention="gqa", batch_size=4, max_length=128)


@pytest.fixture(scope="session")
def server(package: Path) -> Iterator[Running]:
    with running({NAME: package}) as found:
        yield found


@pytest.fixture(scope="session")
def prefix(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The system message, as a saved prefix of the package."""
    file = tmp_path_factory.mktemp("prefix") / "system"
    given = ["generate", package, "--system", SYSTEM, "--save-prefix", file, "--provider", "cpu", "--threads", "1"]
    assert run([str(word) for word in given]) == 0
    return file
