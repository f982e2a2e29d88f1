"""Answers of earlier experiments: found again, never trusted blindly, and never the reason why a report fails."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from partita.files import CACHE_VARIABLE
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.laboratory import FORMAT, Cache, ModelOutcome, cache_for

CUDA = Resolution(known_providers()["cuda"], "active")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def filled(path: Path | None) -> Cache:
    cache = Cache(path)
    cache.put("node:a", ModelOutcome("supported", ""))
    cache.put("node:b", ModelOutcome("crashed", "its process was killed by SIGSEGV"))
    cache.save()
    return cache


def test_the_second_run_tries_only_what_is_new(bench, model):
    models = [model("one"), model("rejected")]
    with bench.lab(cache=cache_for(CUDA)) as first:
        told = first.try_all(models)
    begun = bench.models
    with bench.lab(cache=cache_for(CUDA)) as second:
        again = second.try_all(models)
        assert again == [replace(answer, cached=True) for answer in told if answer] and bench.models == begun
        assert (second.experiments, second.cached, second.crashes) == (0, 2, 0)
        second.try_all([model("two")])
    assert (second.experiments, second.cached) == (1, 2)


def test_two_runs_at_a_time_keep_what_the_other_found(folder):
    path = folder / "answers.json"
    one, two = Cache(path), Cache(path)
    one.put("node:a", ModelOutcome("supported", ""))
    two.put("node:b", ModelOutcome("rejected", "no kernel"))
    one.save()
    two.save()
    assert Cache(path).get("node:a") == ModelOutcome("supported", "", cached=True) and Cache(path).get(
        "node:b"
    ) == ModelOutcome("rejected", "no kernel", cached=True)


OURS = {"format": FORMAT}
FOREIGN = (
    OURS,
    {**OURS, "answers": []},
    {**OURS, "answers": {"node:a": 7}},
    {**OURS, "answers": {"node:a": []}},
    {**OURS, "answers": {"node:a": ["excellent", ""]}},
    {**OURS, "answers": {"node:a": [["supported"], ""]}},
    {"format": FORMAT + 1, "answers": {"node:a": ["supported", ""]}},
    {"format": FORMAT - 1, "answers": {"node:a": ["supported", ""]}},
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"[" * 100_000,
        *(json.dumps(entry).encode() for entry in FOREIGN),
    ],
)
def test_a_damaged_or_foreign_file_is_as_good_as_none_and_is_replaced(folder, content):
    path = folder / "answers.json"
    folder.mkdir()
    path.write_bytes(content)
    assert Cache(path).get("node:a") is None
    filled(path)
    assert Cache(path).get("node:a") == ModelOutcome("supported", "", cached=True)


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "answers.json", tmp_path):
        cache = filled(path)
        assert cache.get("node:a") == ModelOutcome("supported", ""), "it is still known in this run"
        assert Cache(path).get("node:a") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "nothing half-written is left"


def test_a_full_disk_leaves_the_old_answers_and_no_rubbish(folder, monkeypatch):
    path = folder / "answers.json"
    filled(path)
    cache = Cache(path)
    cache.put("node:c", ModelOutcome("rejected", ""))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache.save()
    assert [entry.name for entry in folder.iterdir()] == ["answers.json"]
    assert Cache(path).get("node:a") == ModelOutcome("supported", "", cached=True) and Cache(path).get("node:c") is None


# --- where ---------------------------------------------------------------------------------------------------------


def test_an_empty_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_for(CUDA).path is None


# --- what an answer depends on -------------------------------------------------------------------------------------


def name_of(resolution: Resolution = CUDA) -> str:
    path = cache_for(resolution).path
    assert path is not None
    return path.name


def test_another_option_or_provider_has_another_file():
    names = [
        name_of(),
        name_of(replace(CUDA, options={"device_id": "0"})),
        name_of(replace(CUDA, options={"device_id": "1"})),
        name_of(Resolution(known_providers()["webgpu"], "active")),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("variable", ["VK_ICD_FILENAMES", "CUDA_VISIBLE_DEVICES", f"{PREFIX}MEMORY"])
def test_another_device_has_another_file(monkeypatch, variable):
    before = name_of()
    monkeypatch.setenv(variable, "something else")
    assert name_of() != before


def test_another_plugin_library_has_another_file_also_in_the_same_place(tmp_path):
    library = tmp_path / "libep.so"
    library.write_bytes(b"one")
    plugin = replace(CUDA, library=library)
    before = name_of(plugin)
    assert before != name_of()
    library.write_bytes(b"two")
    os.utime(library, ns=(1, 1))
    assert name_of(plugin) != before
    library.unlink()
    assert name_of(plugin) != before, "and one that is gone is no reason to fail"
