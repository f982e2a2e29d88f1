"""`partita providers`: what this environment can run on, and why not on the rest."""

from __future__ import annotations

from tests.conftest import require
from tests.contract.cases import each_environment
from tests.contract.commands import device_is_there, honoured, wrong_processor
from tests.contract.test_chain import all_unusable


@each_environment()
def test_usable_providers_and_the_reasons_of_the_others(environment, partita):
    missing = [target.needs for target in environment.targets if target.needs and not device_is_there(target)]
    if missing:
        require(missing[0], available=False)
    elsewhere = {target.provider for target in environment.targets if wrong_processor(target)}
    entries = {entry["name"]: entry for entry in honoured(partita("providers", "--json")).json["providers"]}
    usable = {name for name, entry in entries.items() if entry["status"] == "usable"}
    assert usable == set(environment.usable) - elsewhere
    for reason, provider in (*all_unusable(environment), *(("device_missing", name) for name in elsewhere)):
        entry = entries[provider]
        assert (entry["status"], entry["reason"]) == ("unavailable", reason), entry
        assert entry["evidence"] and entry["remedy"], entry
    assert all("onnxruntime-openvino" in entries[name]["remedy"] for name in elsewhere & {"openvino"})
