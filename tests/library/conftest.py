"""Packages and engines that the tests of the library share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.library.chain import read_chain
from partita.library.engine.base import Engine
from partita.library.loading import open_engine
from partita.options.generation import BatchOptions
from partita.options.groups import Process, ProviderChain
from partita.package.folder import read_manifest
from tests.conftest import Exported, TinyCheckpoint


@pytest.fixture(scope="session")
def package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    return exported(tiny_checkpoint("llama"), attention="gqa")


@pytest.fixture(scope="session")
def pair(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> Path:
    """Of batch size 2."""
    return exported(tiny_checkpoint("llama"), attention="gqa", batch_size=2)


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Open a package on the CPU, in this process or in a child."""
    engines: list[Engine] = []

    def factory(folder: Path, *, child: bool = False, **options: Any) -> Any:
        """An engine with an open batch; `options` are those of the batch."""
        process: Process = "child" if child else "this"
        target = read_chain(ProviderChain("cpu", threads=1))
        engine = open_engine(folder, read_manifest(folder), target, observe=False, process=process)
        engines.append(engine)
        engine.open(BatchOptions(**options))
        return engine

    yield factory
    for engine in engines:
        engine.close()
