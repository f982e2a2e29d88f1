"""`partita providers`: what this environment can run on, and why not on the rest."""

from __future__ import annotations

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import device_is_there, honoured, wrong_processor
from tests.contract.test_chain import all_unusable


def listed(partita, **extra):
    """Provider name -> entry of `partita providers --json`."""
    return {entry["name"]: entry for entry in honoured(partita("providers", "--json", **extra)).json["providers"]}


@each_environment()
def test_exactly_these_are_usable(environment, partita):
    missing = [target.needs for target in environment.targets if target.needs and not device_is_there(target)]
    if missing:
        from tests.conftest import require

        require(missing[0], available=False)
    elsewhere = {target.provider for target in environment.targets if wrong_processor(target)}
    entries = listed(partita)
    usable = {name for name, entry in entries.items() if entry["status"] == "usable"}
    assert usable == set(environment.usable) - elsewhere
    assert all(entries[name]["reason"] == "device_missing" for name in elsewhere)
    assert all("onnxruntime-openvino" in entries[name]["remedy"] for name in elsewhere & {"openvino"})


@cases("provider, reason", all_unusable)
def test_each_of_the_others_has_its_reason(environment, provider, reason, partita):
    entry = listed(partita)[provider]
    assert (entry["status"], entry["reason"]) == ("unavailable", reason), entry
    assert entry["evidence"] and entry["remedy"], entry


@each_environment()
def test_as_a_table_it_names_every_provider(environment, partita):
    done = honoured(partita("providers"))
    assert all(name in done.out for name in listed(partita)), done


@pytest.mark.parametrize("environment", [pytest.param("main", marks=pytest.mark.environment("main"), id="main")])
def test_asking_survives_a_crash_of_native_code(environment, partita, tmp_path):
    """An ONNX Runtime that dies as soon as it is imported stands for one that dies while a provider is tried."""
    fake = tmp_path / "crash"
    (fake / "onnxruntime").mkdir(parents=True)
    (fake / "onnxruntime" / "__init__.py").write_text("import os\nos.abort()\n")
    from tests.conftest import REPOSITORY

    done = partita("providers", "--json", PYTHONPATH=f"{fake}:{REPOSITORY}")
    assert done.code in (0, 1, 3), done
    assert done.code >= 0 and done.err.count("\n") <= 3, done
