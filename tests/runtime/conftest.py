"""Fixtures of the runtime tests: tiny packages, made once per session, and runners that are always closed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from partita.providers.resolve import parse_chain
from partita.runtime.runner import Runner, load_runner
from tests.conftest import require
from tests.runtime.tiny_packages import Spec, build, greedy_reference

PackageFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_package(tmp_path_factory: pytest.TempPathFactory) -> PackageFactory:
    """Factory of packages; keywords are those of `Spec`. The same ones give the same folder, so never write into it."""
    require("torch")
    made: dict[Spec, Path] = {}

    def factory(**keywords) -> Path:
        spec = Spec(**keywords)
        if spec not in made:
            made[spec] = build(tmp_path_factory.mktemp("package"), spec)
        return made[spec]

    return factory


@pytest.fixture
def package_copy(tiny_package: PackageFactory, tmp_path: Path) -> Callable[..., Path]:
    """A package of this test's own, to be damaged."""

    def factory(**keywords) -> Path:
        return shutil.copytree(tiny_package(**keywords), tmp_path / "package")

    return factory


@pytest.fixture
def open_runner(tiny_package: PackageFactory) -> Iterator[Callable[..., Runner]]:
    """Open a tiny package on the CPU provider; closed at the end of the test."""
    opened: list[Runner] = []

    def factory(*, observe: bool = False, folder: Path | None = None, **keywords) -> Runner:
        runner = load_runner(folder or tiny_package(**keywords), parse_chain("cpu"), threads=1, observe=observe)
        opened.append(runner)
        return runner

    yield factory
    for runner in opened:
        runner.close()


@pytest.fixture(scope="session")
def reference() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy tokens of transformers' own generate for a prompt."""
    require("torch")
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        key = (tuple(prompt), count)
        if key not in known:
            known[key] = greedy_reference(prompt, count)
        return known[key]

    return tokens


@pytest.fixture
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that tempfile uses during this test, to see what is left in it."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
