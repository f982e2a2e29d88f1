"""Placement of foreign graphs on CUDA: a dry run with stub libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

import partita
from tests.foreign.conftest import SAMPLES


@pytest.mark.parametrize(
    ("layout", "in_place"), [("genai-fp16-cuda", 2), pytest.param("optimum", 0, marks=pytest.mark.heavy)]
)
def test_cuda_dry_run_places_cache_in_device_memory(layout: str, in_place: int, stand_ins: Path) -> None:
    report = partita.place(SAMPLES / layout, "cuda,cpu", dry_run=True, probe_seconds=0, runs=2)
    cache = report.cache
    assert cache is not None and set(cache.memories) == {"Cuda"}
    assert (cache.states, cache.in_place_states) == (2, in_place)
    crossing = {copy.name for phase in report.phases for copy in phase.copies}
    assert not [name for name in crossing if "past" in name or "present" in name], "the cache crosses to the host"
