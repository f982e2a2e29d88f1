"""Memory growth of a server process, as a slope in bytes per request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from partita.library.chain import read_chain
from partita.library.engine.base import ReportRequest
from partita.library.engine.local import LocalEngine
from partita.library.engine.requests import Work
from partita.library.sampling import Sampling
from partita.options.generation import BatchOptions
from partita.options.groups import ProviderChain
from partita.package.folder import read_manifest
from partita.runtime.generate import record
from partita.runtime.ort import binding
from tests.memory import native_bytes, python_blocks, slope
from tests.runtime.handmade_packages import VOCAB, handmade

LOOPS, ROUNDS, EACH = 24, 22, 90
# Threads that spin for each other on cores that other tests use take four times as long.
CPU = ProviderChain(providers="cpu", threads=2, provider_options={"cpu": {"spinning": "0"}})
Samples = list[tuple[float, float]]


def sampled(folder: Path) -> tuple[Samples, Samples]:
    """Bytes of malloc and objects of Python after so many requests, as a server has them: profiled at first, answered
    as they come, with a report between them.
    """
    native, blocks = Samples(), Samples()
    target = read_chain(CPU)
    with closing(LocalEngine(folder, read_manifest(folder), target, observe=True)) as engine:
        engine.open(BatchOptions())
        for turn in range(1, ROUNDS + 1):
            for number in range(EACH):
                prompt = (number % VOCAB, turn % VOCAB, (number * turn) % VOCAB)
                engine.submit(Work(prompt, Sampling(temperature=0.0, max_new_tokens=2)))
            while engine.step():
                pass
            if turn == 2:
                engine.report(ReportRequest())
            native.append((turn * EACH, native_bytes()))
            blocks.append((turn * EACH, python_blocks()))
    return native[ROUNDS // 3 :], blocks[ROUNDS // 3 :]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # What is kept up to a bound has to reach it in a test's time.
    monkeypatch.setattr(record, "KEPT_STEPS", 16)
    monkeypatch.setattr(binding, "NOTED_RUNS", 64)
    return handmade(tmp_path / "package", batch=3, states=("key",), fewer=True, loops=LOOPS)


@pytest.mark.heavy  # tests/serve/test_load.py has fewer requests
def test_memory_is_flat_over_thousands_of_requests(folder: Path) -> None:
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, as a server has
        native, blocks = pool.submit(sampled, folder).result()
    assert abs(slope(native)) < 24, "bytes per request"
    assert abs(slope(blocks)) < 0.5, "objects per request"
