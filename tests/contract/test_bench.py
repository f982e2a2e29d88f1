"""`partita bench` on every provider: the tokens of the CPU, placement as `generate --report` has it, and no crash."""

from __future__ import annotations

import json

import pytest

from partita.bench.records import Bench
from tests.contract.cases import cases, packages_of
from tests.contract.commands import PROMPT, generated, honoured

WORK = ("--prompt", PROMPT, "--token-ids", "--max-new-tokens", 6, "--rounds", 1)


@cases("target, package", packages_of("with_cpu"), sample=True, heavy=("webgpu",))
@pytest.mark.usefixtures("device")
def test_it_measures_the_provider_beside_the_cpu(environment, target, package, packages, partita, tmp_path):
    chain = f"{target.provider},cpu"
    done = honoured(partita("bench", packages / package, "--providers", chain, "cpu", *WORK, "--json"))
    found = Bench.model_validate_json(done.out)
    ours, cpu = found.contenders
    assert (ours.status, cpu.status, ours.rounds, cpu.rounds) == ("measured", "measured", 1, 1)
    assert ours.same_tokens is True and ours.repeats is True, ours.difference
    assert ours.unused == () and found.verdict[0].startswith(f"{chain} is ")
    report = tmp_path / "report.json"
    honoured(generated(partita, packages / package, chain, "--report", report))
    decode = next(phase for phase in json.loads(report.read_text())["phases"] if phase["name"] == "decode")
    assert ours.why is not None and ours.why.provider == target.ort_name
    assert (ours.why.copies, ours.why.partitions) == (len(decode["copies"]), len(decode["partitions"]))
