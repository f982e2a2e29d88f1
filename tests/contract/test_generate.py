"""A package on a provider: the tokens of the CPU when it is behind it; alone, all of it or a refusal naming nodes."""

from __future__ import annotations

import json

import pytest

from partita.bench.records import Bench
from tests.contract.cases import cases, packages_of
from tests.contract.commands import PROMPT, chain_entry, generated, honoured, nodes_on, refused


@cases("target, package", packages_of("with_cpu"), sample=True)
@pytest.mark.usefixtures("device")
def test_with_the_cpu_behind_it_gives_the_tokens_of_the_cpu(
    environment, target, package, packages, partita, cpu_tokens, tmp_path
):
    report = tmp_path / "report.json"
    name, value = target.option
    option = ("--provider-option", f"{target.provider}.{name}={value}") if name else ()
    done = honoured(generated(partita, packages / package, f"{target.provider},cpu", "--report", report, *option))
    assert done.out == cpu_tokens(package)
    content = json.loads(report.read_text())
    assert chain_entry(content, environment, target.ort_name)["status"] == "active"
    assert nodes_on(content, target.ort_name) > 0
    assert [check for check in content["checks"] if not check["passed"]] == []
    cache = content["cache"]
    assert cache["in_place_states"] == cache["states"] and cache["address_changes"] == 0, cache


@cases("target, package", packages_of("refused_alone"))
@pytest.mark.usefixtures("device")
def test_alone_is_refused_with_the_nodes_that_would_not_go(environment, target, package, packages, partita):
    done = refused(generated(partita, packages / package, target.provider), target.ort_name)
    table = done.err.partition("partita: ")[2].splitlines()[1:]
    assert table, done
    file = json.loads((packages / package / "manifest.json").read_text())["graph"]["files"][0]["file"]
    assert any(op in done.err for op in op_types(packages / package / file)), done
    assert "model." in done.err or "layers" in done.err, done


@cases("target, package", packages_of("fails"), sample=True)
@pytest.mark.usefixtures("device")
def test_a_provider_that_breaks_on_a_graph_is_left_out_and_says_so(
    environment, target, package, packages, partita, cpu_tokens, tmp_path
):
    refused(generated(partita, packages / package, target.provider), target.provider)
    report = tmp_path / "report.json"
    done = honoured(generated(partita, packages / package, f"{target.provider},cpu", "--report", report))
    assert done.out == cpu_tokens(package)
    assert any(target.provider in line and "initialisation_failed" in line for line in done.err.splitlines()), done
    entry = chain_entry(json.loads(report.read_text()), environment, target.ort_name)
    # By experiments the report may know more than the note: which part of the graph the provider fails over.
    assert entry["status"] == "unavailable" and entry["evidence"]
    assert entry["reason"] in ("initialisation_failed", "subgraph_rejected"), entry


def op_types(path):
    import onnx

    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


# `partita bench` on every provider: the tokens of the CPU, placement as `generate --report` has it, and no crash


WORK = ("--prompt", PROMPT, "--token-ids", "--max-new-tokens", 6, "--rounds", 1)


@cases("target, package", packages_of("with_cpu"), sample=True, heavy=("webgpu",))
@pytest.mark.usefixtures("device")
def test_it_measures_the_provider_beside_the_cpu(environment, target, package, packages, partita, tmp_path):
    chain = f"{target.provider},cpu"
    done = honoured(partita("bench", packages / package, "--providers", chain, "cpu", *WORK, "--json"))
    found = Bench.model_validate_json(done.out)
    ours, cpu = found.contenders
    assert (ours.status, cpu.status, ours.rounds, cpu.rounds) == ("measured", "measured", 1, 1)
    assert ours.same_tokens is True and ours.repeatable is True, ours.difference
    assert ours.unused_providers == () and found.verdict[0].startswith(f"{chain} is ")
    report = tmp_path / "report.json"
    honoured(generated(partita, packages / package, chain, "--report", report))
    alone = json.loads(report.read_text())["summary"]
    assert ours.summary is not None and ours.summary.preferred_provider == target.ort_name
    here = next(phase for phase in ours.summary.phases if phase.phase == "decode")
    there = next(phase for phase in alone["phases"] if phase["phase"] == "decode")
    assert (here.nodes_by_provider, here.copies) == (there["nodes_by_provider"], there["copies"])
