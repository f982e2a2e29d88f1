"""Models in a child process: equal results, isolated crashes and isolated Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

import partita
from partita.library.engine.remote import RemoteEngine
from partita.library.generation import Generation
from partita.options.generation import BatchOptions
from partita.providers.resolve import parse_chain
from tests.commands.test_place import press_ctrl_c
from tests.conftest import REPOSITORY

PROMPT = [5, 6, 7]
SECONDS = 60.0
"""Longest wait for what takes a moment."""


@pytest.fixture
def model(package):
    """For tests that end its process."""
    with partita.load(package, providers="cpu", process="child") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def lasting(package):
    """Closing it ends the process and removes its folder."""
    loaded = partita.load(package, providers="cpu", process="child")
    worker = engine_of(loaded)._worker
    child = psutil.Process(worker.process.pid)
    yield loaded
    loaded.close()
    assert not child.is_running() and not worker.folder.exists()


def engine_of(model: partita.Model) -> RemoteEngine:
    assert isinstance(model.engine, RemoteEngine)
    return model.engine


def test_child_process_model_matches_in_process_model(lasting, package):
    model = lasting
    generation = model.generate("return the", max_new_tokens=5, stop_token_ids=()).run()
    with partita.load(package, providers="cpu") as here:
        expected = here.generate("return the", max_new_tokens=5, stop_token_ids=()).run()
        theirs = here.report()
    assert (generation.text, generation.tokens) == (expected.text, expected.tokens)
    report = model.report()
    assert isinstance(report, partita.Report) and all(check.passed for check in report.checks)
    assert report.request == theirs.request
    assert [phase.providers for phase in report.phases] != [] and report.fallbacks == theirs.fallbacks
    assert model.verify().status == "verified"
    with pytest.raises(partita.GenerationError, match="the cache length is 64"):
        model.generate([1] * 65)


def test_ctrl_c_interrupts_only_current_generation(lasting, monkeypatch):
    model = lasting
    expected = model.generate(PROMPT, max_new_tokens=4, stop_token_ids=()).run().tokens
    generation = model.generate(PROMPT, max_new_tokens=50, stop_token_ids=())
    next(generation)
    generation.progress.ready.clear()  # the worker may have sent several steps at once
    with monkeypatch.context() as patch:
        patch.setattr("partita.library.engine.remote._Inbox.get", press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    assert list(generation) == [] and generation.finish_reason == "interrupted"
    assert model.generate(PROMPT, max_new_tokens=4, stop_token_ids=()).run().tokens == expected


GENERATES = """
import sys, partita
model = partita.load(sys.argv[1], "cpu", process="child")
while True:
    for step in model.generate([5, 6, 7], max_new_tokens=40, stop_token_ids=()):
        print(model.engine._worker.process.pid, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_signal_ends_child_and_removes_temporary_folder(package, tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", GENERATES, str(package)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert program.stdout is not None
    child = psutil.Process(int(program.stdout.readline()))
    assert list(tmp_path.glob("partita-*"))
    program.send_signal(number)
    program.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while (child.is_running() or list(tmp_path.glob("partita-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert program.returncode != 0
    assert not child.is_running() and not list(tmp_path.glob("partita-*"))


def test_crash_during_generation_requires_reload(model):
    generation = slow(model)
    for number in (signal.SIGSEGV, signal.SIGCONT):
        engine_of(model)._worker.process.send_signal(number)
    with pytest.raises(partita.ProviderError) as caught:
        generation.run()
    said = str(caught.value)
    assert "the worker process crashed during generation" in said and "SIGSEGV" in said
    assert "initialisation_failed" not in said and said.endswith("load the package again")
    assert caught.value.remedy is not None
    assert list(generation) == [] and generation.finish_reason == "error"
    for call in (lambda: model.generate(PROMPT), model.report):
        with pytest.raises(partita.ProviderError, match="crashed during generation.*SIGSEGV.*; load the package again"):
            call()


def slow(model: partita.Model) -> partita.Generation:
    """A generation that waits for a worker which stands still."""
    engine = engine_of(model)
    engine.open(BatchOptions())
    engine._worker.process.send_signal(signal.SIGSTOP)
    work = partita.request(model, PROMPT, max_new_tokens=4)
    return Generation(engine, [work], engine.chunk, samplings=[work.sampling], speculation=BatchOptions())


def test_report_survives_crash_and_error_names_provider_to_remove(model, tmp_path):
    model.generate(PROMPT, max_new_tokens=4, stop_token_ids=()).run()
    report, engine = model.report(), engine_of(model)
    engine.target = replace(engine.target, chain=parse_chain("webgpu,cpu"))
    engine._worker.process.send_signal(signal.SIGSEGV)
    with pytest.raises(partita.ProviderError, match="crashed during reading a prefix") as caught:
        model.save_prefix(tmp_path / "prefix", [5, 6])
    assert "load the package again, or remove webgpu from the chain" in str(caught.value)
    assert model.report() == report
