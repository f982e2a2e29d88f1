"""`--graph-capture`: decode steps recorded once and replayed, with the tokens of the CPU, or a refusal with why."""

from __future__ import annotations

import json

import pytest

from partita.runtime.generate.record.graph_capture import WITHOUT
from tests.contract.cases import cases, packages_of
from tests.contract.commands import generated, honoured, nodes_on, refused


@cases("target, package", packages_of("captured"), sample=True)
@pytest.mark.usefixtures("device")
def test_a_recorded_step_gives_the_tokens_of_the_cpu(
    environment, target, package, packages, partita, cpu_tokens, tmp_path
):
    """Without the CPU in the chain, so all of it runs on the provider."""
    report = tmp_path / "report.json"
    done = honoured(generated(partita, packages / package, target.provider, "--graph-capture", "--report", report))
    assert done.out == cpu_tokens(package)
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and nodes_on(content, "CPUExecutionProvider") == 0
    assert content["fallbacks"] == []


@cases("target, package", packages_of("off_capture"))
@pytest.mark.usefixtures("device")
def test_nodes_elsewhere_are_named_before_anything_runs(environment, target, package, packages, partita):
    """That it runs without is tested in test_generate.py."""
    said = ("graph capture is not possible", f"would not run on {target.provider}", target.off_capture[package])
    done = generated(partita, packages / package, f"{target.provider},cpu", "--graph-capture")
    refused(done, *said, WITHOUT.text)


@cases("target, package", packages_of("miscaptured"))
@pytest.mark.usefixtures("device")
def test_a_replay_that_leaves_something_out_is_refused_before_a_token_comes_of_it(
    environment, target, package, packages, partita, cpu_tokens
):
    done = generated(partita, packages / package, target.provider, "--graph-capture")
    assert done.code == 3 and "a replayed step computes a different result" in done.err, done
    assert cpu_tokens(package).startswith(done.out.strip())  # what came before is right
