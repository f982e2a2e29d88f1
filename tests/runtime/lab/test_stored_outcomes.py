"""Cache of probe outcomes: reuse, keys, and damaged or unwritable files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from partita.files import CACHE_VARIABLE
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.laboratory import Cache, cache_for
from partita.runtime.lab.placement import Placement

CUDA = Resolution(known_providers()["cuda"], "active")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def filled(path: Path | None) -> Cache:
    cache = Cache(path)
    cache.put("node:a", Placement("supported", ""))
    cache.put("node:b", Placement("crashed", "its process was killed by SIGSEGV"))
    cache.save()
    return cache


def test_second_run_probes_only_new_models(bench, model):
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


def test_concurrent_saves_merge_outcomes(folder):
    path = folder / "answers.json"
    one, two = Cache(path), Cache(path)
    one.put("node:a", Placement("supported", ""))
    two.put("node:b", Placement("rejected", "no kernel"))
    one.save()
    two.save()
    assert Cache(path).get("node:a") == Placement("supported", "", cached=True) and Cache(path).get(
        "node:b"
    ) == Placement("rejected", "no kernel", cached=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b'{"node:a": {"outcome": "excellent"}}',
        b'{"node:a": {"outcome": "supported", "replaced_by": "magic"}}',
    ],
)
def test_damaged_or_foreign_cache_file_is_replaced(folder, content):
    path = folder / "answers.json"
    folder.mkdir()
    path.write_bytes(content)
    assert Cache(path).get("node:a") is None
    filled(path)
    assert Cache(path).get("node:a") == Placement("supported", "", cached=True)


def test_unwritable_cache_folder_does_not_raise(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "answers.json", tmp_path):
        cache = filled(path)
        assert cache.get("node:a") == Placement("supported", ""), "it is still known in this run"
        assert Cache(path).get("node:a") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "nothing half-written is left"


def test_cache_file_depends_on_provider_options_device_and_plugin(monkeypatch, tmp_path):
    library = tmp_path / "libep.so"
    library.write_bytes(b"one")
    webgpu = Resolution(known_providers()["webgpu"], "active")
    subjects = [
        CUDA,
        webgpu,
        *(replace(CUDA, options={"device_id": each}) for each in "01"),
        replace(CUDA, library=library),
    ]
    paths = {cache_for(each).path for each in subjects}
    library.write_bytes(b"another")
    paths.add(cache_for(subjects[-1]).path)
    for variable in ("VK_ICD_FILENAMES", "CUDA_VISIBLE_DEVICES", f"{PREFIX}MEMORY"):
        monkeypatch.setenv(variable, "something else")
        paths.add(cache_for(CUDA).path)
    assert len(paths) == len(subjects) + 1 + 3
