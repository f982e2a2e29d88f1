"""Fixtures of the runtime tests: packages from the real exporter, and runners that are always closed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from partita.providers.resolve import parse_chain
from partita.runtime.generate.runner import Runner, load_runner
from tests.conftest import Exported, TinyCheckpoint, require
from tests.runtime.handmade_packages import handmade

PackageFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_package(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> PackageFactory:
    """Factory of packages of a tiny llama; keywords are those of `ExportOptions`. Never write into what it gives.

    The same keywords give the same folder. An export takes seconds: use the options of other tests where any will do.
    """

    def factory(**options: Any) -> Path:
        return exported(tiny_checkpoint("llama"), **options)

    return factory


@pytest.fixture
def package_copy(tiny_package: PackageFactory, own_copy: Callable[[Path], Path]) -> PackageFactory:
    """A package of this test's own, to be damaged."""

    def factory(**options: Any) -> Path:
        return own_copy(tiny_package(**options))

    return factory


@pytest.fixture
def open_runner(tiny_package: PackageFactory) -> Iterator[Callable[..., Runner]]:
    """Open a tiny package on the CPU provider; closed at the end of the test."""
    opened: list[Runner] = []

    def factory(*, observe: bool = False, **options: Any) -> Runner:
        runner = load_runner(tiny_package(**options), parse_chain("cpu"), threads=1, observe=observe)
        opened.append(runner)
        return runner

    yield factory
    for runner in opened:
        runner.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    """Make a handmade package and open it on the CPU provider; closed at the end of the test."""
    runners: list[Runner] = []

    def factory(*, observe: bool = False, **options: Any) -> Runner:
        folder = handmade(tmp_path / str(len(runners)), **options)
        runners.append(load_runner(folder, parse_chain("cpu"), threads=1, observe=observe))
        return runners[-1]

    yield factory
    for runner in runners:
        runner.close()


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: TinyCheckpoint) -> Callable[[Sequence[int], int], list[int]]:
    """Greedy tokens of transformers' own generate for a prompt, in float32; the end token does not end it."""
    require("torch")
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("llama"), dtype=torch.float32, attn_implementation="eager"
    )
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        key = (tuple(prompt), count)
        if key not in known:
            ids = torch.tensor([list(prompt)])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key]

    return tokens


@pytest.fixture
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that tempfile uses during this test, to see what is left in it."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
