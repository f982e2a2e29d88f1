"""Probes in a child process: crashes, timeouts, budgets, start failures, and the cache of outcomes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from partita.files import CACHE_VARIABLE
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab import laboratory
from partita.runtime.lab.laboratory import Cache, cache_for
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.tables import measure_graph
from tests.runtime.lab.conftest import ScriptedLab

if TYPE_CHECKING:
    pass

CUDA = Resolution(known_providers()["cuda"], "active")


def outcomes(answers):
    return [answer.outcome if answer is not None else None for answer in answers]


def test_crash_is_recorded_and_later_models_are_probed(bench, model):
    with bench.lab() as here:
        answers = here.try_all([model("one"), model("crash"), model("two"), model("leave"), model("rejected")])
    assert outcomes(answers) == ["supported", "crashed", "supported", "crashed", "rejected"]
    assert answers[4] and answers[4].message == "no kernel"
    assert answers[1] and "killed by SIGSEGV" in answers[1].message
    assert answers[1].message.endswith("assertion failed in the driver")
    assert answers[3] and "ended with exit code 3" in answers[3].message
    assert (here.experiments, here.cached, here.crashes) == (5, 0, 2) and not here.unusable


def test_crash_counts_only_if_repeated_in_new_process(bench, model):
    """A model that corrupts the process must not mark later models as crashed, in the same batch or the next."""
    with bench.lab() as here:
        assert outcomes(here.try_all([model("poison"), model("innocent"), model("poison 2")])) == ["supported"] * 3
        assert outcomes(here.try_all([model("innocent 2"), model("two")])) == ["supported"] * 2
    assert here.crashes == 0 and len(bench.notes("pids")) == 3


def test_hanging_model_times_out_and_later_models_are_probed(bench, model, monkeypatch):
    monkeypatch.setattr(laboratory, "MODEL_SECONDS", 1.0)
    monkeypatch.setattr(laboratory, "START_SECONDS", 5.0)  # a busy machine starts a process in two
    with bench.lab() as here:
        answers = here.try_all([model("one"), model("hang"), model("two")])
    assert outcomes(answers) == ["supported", "timed_out", "supported"] and here.crashes == 0
    assert answers[1] and answers[1].message == "no answer within 5 s", "it was tried again, with more time"


def test_timeout_and_kill_are_not_cached_but_crash_is(bench, model, monkeypatch, tmp_path):
    monkeypatch.setattr(laboratory, "MODEL_SECONDS", 1.0)
    monkeypatch.setattr(laboratory, "START_SECONDS", 3.0)  # a busy machine starts a process in two
    models = [model("one"), model("hang"), model("kill"), model("crash")]
    for cached in (0, 2):
        with bench.lab(cache=Cache(tmp_path / "answers.json")) as here:
            assert outcomes(here.try_all(models)) == ["supported", "timed_out", "crashed", "crashed"]
        assert here.cached == cached


@pytest.mark.parametrize(
    ("outcome", "said", "lasts"),
    [
        ("failed", "CUDA failure 2: out of memory ; GPU=0 ; hostname=x", False),
        ("failed", "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=x", False),
        ("failed", "Exception during initialization: std::bad_alloc", False),
        ("crashed", "its process was killed by SIGABRT; its last output: what():  std::bad_alloc", False),
        ("crashed", "its process was killed by SIGSEGV", True),
        ("failed", "opset 22 is not known to the device compiler", True),
        ("rejected", "no kernel that computes out of memory", True),
    ],
)
def test_out_of_memory_outcomes_are_not_repeatable(outcome, said, lasts):
    assert Placement(outcome, said).is_repeatable is lasts


def test_zero_budget_returns_cached_outcomes_only(bench, model, tmp_path):
    with bench.lab(cache=Cache(tmp_path / "answers.json")) as here:
        here.try_all([model("one")])
    with bench.lab(seconds=0.0, cache=Cache(tmp_path / "answers.json")) as late:
        assert outcomes(late.try_all([model("one"), model("two")])) == ["supported", None]
    assert len(bench.notes("models")) == 1 and not late.unusable


@pytest.mark.parametrize(("mode", "first"), [("", "supported"), ("sleep", None)])
def test_exhausted_budget_leaves_remaining_models_without_outcome(bench, model, mode, first):
    bench.mode(mode)
    with bench.lab(seconds=3.0) as here:
        assert outcomes(here.try_all([model("one"), model("hang"), model("two")])) == [first, None, None]
    assert here.crashes == 0 and not here.unusable


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("refuse", "device_missing: no adapter"),
        ("abort", "was killed by SIGABRT while it started"),
        ("sleep", "did not start within 0.5 s"),
    ],
)
def test_provider_start_failure_is_recorded_without_retry(bench, model, monkeypatch, mode, says):
    monkeypatch.setattr(laboratory, "START_SECONDS", 0.5 if mode == "sleep" else 60.0)
    bench.mode(mode)
    with bench.lab() as here:
        assert here.try_all([model("one"), model("two")]) == [None, None]
        assert says in here.unusable and here.experiments == 0
        assert here.try_all([model("three")]) == [None] and not here.starts()


def test_interrupted_lab_ends_its_process_and_saves_cache(bench, model, monkeypatch, tmp_path):
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(KeyboardInterrupt), bench.lab(cache=Cache(tmp_path / "answers.json")) as here:
        assert here.starts()
        here.try_all([model("one"), model("rejected")])
        raise KeyboardInterrupt
    assert not any(map(psutil.pid_exists, bench.notes("pids"))) and list(folder.iterdir()) == []
    assert len(Cache(tmp_path / "answers.json")) == 3


# --- stored outcomes -------------------------------------------------------------------------------------------------

STORED = Placement("supported", cached=True)


def filled(path: Path) -> Cache:
    cache = Cache(path)
    cache["node:a"] = Placement("supported")
    cache.save()
    return cache


def test_second_run_probes_only_new_models(bench, model, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    models = [model("one"), model("rejected")]
    with bench.lab(cache=cache_for(CUDA)) as first:
        answers = first.try_all(models)
    begun = bench.notes("models")
    with bench.lab(cache=cache_for(CUDA)) as second:
        again = second.try_all(models)
        assert (
            again == [replace(answer, cached=True) for answer in answers if answer] and bench.notes("models") == begun
        )
        assert (second.experiments, second.cached, second.crashes) == (0, 2, 0)
        second.try_all([model("two")])
    assert (second.experiments, second.cached) == (1, 2)


def test_concurrent_saves_merge_outcomes(tmp_path):
    path = tmp_path / "answers.json"
    other = Cache(path)
    filled(path)
    other["node:b"] = Placement("rejected", "no kernel")
    other.save()
    assert Cache(path) == {"node:a": STORED, "node:b": Placement("rejected", "no kernel", cached=True)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b'{"node:a": {"outcome": "excellent"}}',
        b'{"node:a": {"outcome": "supported", "replaced_by": "magic"}}',
    ],
)
def test_damaged_or_foreign_cache_file_is_replaced(tmp_path, content):
    path = tmp_path / "answers.json"
    path.write_bytes(content)
    assert Cache(path).get("node:a") is None
    filled(path)
    assert Cache(path).get("node:a") == STORED


def test_unwritable_cache_folder_does_not_raise(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "answers.json", tmp_path):
        assert filled(path).get("node:a") == Placement("supported"), "it is still known in this run"
        assert Cache(path).get("node:a") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "no partial file is left"


def test_cache_file_depends_on_provider_options_device_and_plugin(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    library = tmp_path / "libep.so"
    library.write_bytes(b"one")
    webgpu, plugin = Resolution(known_providers()["webgpu"], "active"), replace(CUDA, library=library)
    subjects = [CUDA, webgpu, *(replace(CUDA, options={"device_id": each}) for each in "01"), plugin]
    paths = {cache_for(each).path for each in subjects}
    library.write_bytes(b"another")
    paths.add(cache_for(plugin).path)
    for variable in ("VK_ICD_FILENAMES", "CUDA_VISIBLE_DEVICES", f"{PREFIX}MEMORY"):
        monkeypatch.setenv(variable, "something else")
        paths.add(cache_for(CUDA).path)
    assert len(paths) == len(subjects) + 1 + 3


# --- support of a graph ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "whole", "unsupported", "untested", "failure"),
    [
        ("rejected", "supported", {"Sqrt": 1}, 0, ""),
        ("crashed", "supported", {"Sqrt": 1}, 0, ""),
        ("timed_out", "supported", {}, 1, ""),
        ("supported", "failed", {}, 0, "message"),
        ("supported", "timed_out", {}, 0, ""),
        ("supported", "supported", {}, 0, ""),
    ],
)
def test_graph_support_counts_nodes_by_outcome(cut, outcome, whole, unsupported, untested, failure):
    """`outcome` of the Sqrt alone and of the whole graph."""
    graph = cut("g (float[2] x) => (float[2] y) {\n  [a] h = Relu(x)\n  [b] i = Sqrt(h)\n  [c] y = Exp(i)\n}").proto

    def answer(model) -> Placement:
        operators = [node.op_type for node in model.graph.node]
        return Placement(whole if len(operators) == 3 else outcome if "Sqrt" in operators else "supported", "message")

    found = measure_graph(graph.SerializeToString(), {"x": (2,)}, ScriptedLab(answer, CUDA))
    assert found == (3, unsupported, failure, untested)
