"""A sample of onnx's backend tests, compared with plain ONNX Runtime; `make truth` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import require, require_dry_run
from tests.contract.commands import device_is_there
from tests.contract.expectations import ENVIRONMENTS
from tests.truth.__main__ import WHERE
from tests.truth.compare import compare, contradicted
from tests.truth.models import names, sample

SAMPLE = 5
PROVIDERS = [pytest.param(name, marks=pytest.mark.environment(WHERE[name])) for name in ("cpu", "cuda", "webgpu")]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_placement_matches_onnxruntime_and_reasons_match_support_table(provider: str, tmp_path: Path) -> None:
    if provider == "cuda":
        require_dry_run()
    for target in ENVIRONMENTS[WHERE[provider]].targets:
        if target.provider == provider and target.needs:
            require(target.needs, device_is_there(target))
    models = names()
    assert len(models) > 1500
    assert {name.partition("/")[0] for name in models} == {"node", "simple", "pytorch-converted", "pytorch-operator"}
    chosen = {name: models[name] for name in sample(models, SAMPLE)}
    found = list(compare(chosen, WHERE[provider], provider, tmp_path))
    assert [(entry.name, entry.problem) for entry in found if entry.problem] == []
    assert sum(entry.reported == "a report" for entry in found) >= SAMPLE / 2, "most of them open"
    assert contradicted(found, provider, tmp_path) == {}
